"""What a change inside a model does to its outputs, to first order: squared gradients, a few backward passes for all.

For a change d of the residual stream behind a segment the outputs change by J d. With random signs v, one for each
number that the model gives, E (v' J d)^2 = |J d|^2 (Hutchinson 1990), and v' J is one backward pass, whatever the
change and however many are tried. No label is asked, and outputs are what the model gives: dense where it gives those.

Legend: B images of a piece, N tokens, C channels, V directions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from calib.inputs import Inputs, chunks, map_tensors
from corp_deploy.families import traced_model
from corp_deploy.families.family import answers, steps_to_outputs
from corp_deploy.traced.models.steps import SegmentStep, StreamState

DIRECTIONS = 3
_LEAST_ENERGY = 1e-30
Place = TypeVar("Place")
PIECE_TOKENS = 2048  # as many tokens have their gradients by segment and direction in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Tangent(Generic[Place]):
    """Of a piece of the inputs: what stands at some places, such as the stream behind every segment [B,N,C]; the
    gradients of the outputs by what changes there in every direction [V,B,...]; and the outputs' energy.
    """

    at: Mapping[Place, Tensor]
    gradients: Mapping[Place, Tensor]
    energy: float

    def energy_of_change(self, place: Place, change_BNC: Tensor) -> float:
        """Squared change of the outputs, summed over the piece, when the stream there changes by so much."""
        moved_VB = torch.einsum("vbnc,bnc->vb", self.gradients[place], change_BNC).double()
        return float(moved_VB.square().mean(dim=0).sum())


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=generator.device)
    return (2 * drawn - 1).to(like)


def joined(outputs: Sequence[Tensor]) -> Tensor:
    """Several as one [B,F], each with the same energy, so that all count alike; one as it is."""
    if len(outputs) == 1:
        return outputs[0]
    energies = torch.stack([output.detach().double().square().sum() for output in outputs])
    scales = (energies.mean() / energies.clamp_min(_LEAST_ENERGY)).sqrt()
    return torch.cat([(output * scale.to(output)).flatten(1) for output, scale in zip(outputs, scales, strict=True)], 1)


def tangent_of(
    outputs: Tensor, at: Mapping[Place, Tensor], changing: Mapping[Place, Tensor], generator: torch.Generator
) -> Tangent[Place]:
    """Of outputs that were computed with gradients of what changes."""
    by_direction = [
        torch.autograd.grad(
            outputs,
            tuple(changing.values()),
            signs(outputs, generator),
            retain_graph=True,
            materialize_grads=True,  # what no output hangs on moves none
        )
        for _ in range(DIRECTIONS)
    ]
    gradients = map(torch.stack, zip(*by_direction, strict=True))
    return Tangent(
        at={place: tensor.detach() for place, tensor in at.items()},
        gradients=dict(zip(changing, gradients, strict=True)),
        energy=float(outputs.detach().double().square().sum()),
    )


def _tangent(model: nn.Module, inputs: Inputs, generator: torch.Generator) -> Tangent[str]:
    x_BNC = traced_model.embedded(model, inputs).detach().requires_grad_()
    walk = StreamState.of(x_BNC, traced_model.token_weights(model, inputs))
    behind: dict[str, Tensor] = {}
    for step in steps_to_outputs(model):
        walk = walk.behind(step)
        if isinstance(step, SegmentStep):
            behind[step.name] = walk.tokens.x
    return tangent_of(joined(answers(model, walk, inputs)), behind, behind, generator)


def tangents(model: nn.Module, inputs: Inputs) -> Iterator[Tangent[str]]:
    """Of the inputs, a few at a time; to be called outside inference mode, for a model that is evaluated."""
    tokens = len(traced_model.token_kinds(model))
    if not tokens:
        with torch.no_grad():
            tokens = traced_model.embedded(model, next(chunks(inputs, 1))).shape[1]
    generator = torch.Generator().manual_seed(0)
    for piece in chunks(inputs, max(1, PIECE_TOKENS // tokens)):
        with torch.enable_grad():
            tangent = _tangent(model, map_tensors(piece, torch.clone), generator)
        yield tangent
