"""A model's blocks as they are walked through: the residual stream behind each.

Legend: B inputs, N tokens, C channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.inputs import Inputs
from corp_deploy.families import traced_model
from corp_deploy.families.family import answers
from corp_deploy.traced.models.steps import SegmentStep, Step, StreamState
from corp_deploy.traced.models.token_merging import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The steps of one block by its name; a block that can't be taken apart is the only step of its own."""

    name: str
    steps: tuple[Step, ...]

    def holds(self, site: str) -> bool:
        """Whether a site of this name stands in it: one that a step says, else one named behind the block."""
        named_sites = {name for step in self.steps if isinstance(step, SegmentStep) for name in step.sites}
        return site in named_sites if named_sites else f"{site}.".startswith(f"{self.name}.")

    def __call__(self, walk: StreamState) -> StreamState:
        """Behind all of them."""
        for step in self.steps:
            walk = walk.behind(step)
        return walk


def blocks(model: nn.Module) -> tuple[Block, ...]:
    """The model's steps, those of one block together; what is no segment goes with the block before it."""
    groups: list[tuple[str, list[Step]]] = [("", [])]
    for step in traced_model.steps(model):
        if isinstance(step, SegmentStep) and step.name != groups[-1][0]:
            groups.append((step.name, []))
        groups[-1][1].append(step)
    return tuple(Block(name=name, steps=tuple(steps)) for name, steps in groups if steps)


def streams(model: nn.Module, x_BNC: Tensor, weights_BN: Tensor | None) -> tuple[Tokens, ...]:
    """The residual stream behind each block, of one that enters the first."""
    walk, behind = StreamState.of(x_BNC, weights_BN), list[Tokens]()
    for block in blocks(model):
        walk = block(walk)
        behind.append(walk.tokens)
    return tuple(behind)


def joined_answers(model: nn.Module, last: Tokens, inputs: Inputs) -> Tensor:
    """The outputs that read the last stream [B,...], or that stream where none does: streams behind blocks are
    lessons by themselves. Several are one [B,F], in which a token counts by its share of an output.
    """
    outputs = answers(model, StreamState(tokens=last), inputs) or (last.x,)
    if len(outputs) == 1:
        return outputs[0]
    tokens = [output[0].numel() // output.shape[-1] for output in outputs]
    return torch.cat([output.flatten(1) / count**0.5 for output, count in zip(outputs, tokens, strict=True)], dim=1)
