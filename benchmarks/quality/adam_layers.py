"""Reduced sublayers fitted to the dense stream by Adam: what a fit without a step size is compared with."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from corp_deploy.polish.blocks import fitted_steps
from corp_deploy.polish.newton import Sublayer, counts
from corp_deploy.polish.segments import segment_sublayer
from corp_deploy.polish.walk import Block, StreamPair, walk

JUDGED = 4  # times on the way that the held-out inputs are looked at; the best that was met stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Steps of each sublayer, of so many tokens or more; the step size falls to nothing along a cosine."""

    steps: int
    step_size: float = 1e-3
    tokens: int = 2048


def _square(own: Sublayer, pairs: Sequence[StreamPair]) -> Tensor:
    """The mean square of what the stream lacks behind the branch, over the tokens that count."""
    sums, weights = list[Tensor](), list[Tensor]()
    for pair in pairs:
        counts_BN = counts(own.read, pair)
        behind_BNC = own.step(*pair.reduced.tokens[:2])
        sums.append(((pair.target - behind_BNC).square().sum(dim=-1) * counts_BN).sum())
        weights.append(counts_BN.sum())
    return torch.stack(sums).sum() / torch.stack(weights).sum()


def fit_by_adam_(own: Sublayer, layers: Sequence[nn.Module], pairs: Sequence[StreamPair], how: Adam) -> None:
    """All weights of the sublayer's layers, in place; never worse on the pairs held out."""
    fitted, held_out = ([pair for pair in pairs if pair.held_out == which] for which in (False, True))
    at_once = -(-how.tokens // fitted[0].reduced.tokens.x.shape[:2].numel())
    parameters = [parameter.requires_grad_() for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=how.step_size)
    generator = torch.Generator().manual_seed(0)
    best, least = [parameter.detach().clone() for parameter in parameters], float(_square(own, held_out))
    for step in range(how.steps):
        order = torch.randperm(len(fitted), generator=generator)[:at_once].tolist()
        with torch.enable_grad():
            loss = _square(own, [fitted[index] for index in order])
            optimizer.zero_grad()
            loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = how.step_size * 0.5 * (1.0 + math.cos(math.pi * step / how.steps))
        optimizer.step()
        if (step + 1) * JUDGED // how.steps > step * JUDGED // how.steps and (
            now := float(_square(own, held_out))
        ) < least:
            best, least = [parameter.detach().clone() for parameter in parameters], now
    for parameter, value in zip(parameters, best, strict=True):
        parameter.requires_grad_(False).copy_(value)


@torch.no_grad()
def adam_layers_(dense: nn.Module, model: nn.Module, pairs: list[StreamPair], how: Adam) -> float:
    """Every narrower sublayer in turn, in place; the processor's seconds that it took."""
    seconds, steps = [0.0], fitted_steps(dense, model)

    def fit(block: Block, both: Sequence[StreamPair]) -> None:
        if block.name in steps:
            start, own = time.process_time(), segment_sublayer(model, steps[block.name])
            fit_by_adam_(own, [each.layer for each in own.matrices], both, how)
            seconds.append(time.process_time() - start)

    walk(dense, model, pairs, fit)
    return sum(seconds)
