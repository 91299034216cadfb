"""A check that two runs of a program give the same finite outputs, which names the first operation that doesn't."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ground.errors import BadInput

from .program import Program, module_of


class NotFinite(BadInput):
    """A program that gives NaN or infinity on these inputs."""


ROUNDING = 1e-6
"""A limit relative to the sum of magnitudes: rounding in another order, as on GPUs, stays below, noise above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """A summary of a node's values: sums of the finite ones with sums of magnitudes, and flags for NaN and infinity."""

    sums: tuple[tuple[float, float], ...]
    is_number: bool
    is_finite: bool

    def is_like(self, other: "_Summary") -> bool:
        """Check that the sums differ by no more than rounding."""
        pairs = zip(self.sums, other.sums, strict=True)
        return all(abs(one - two) <= ROUNDING * magnitude for (one, magnitude), (two, _) in pairs)


class _Summarizer(fx.Interpreter):
    """An interpreter that keeps a summary of each node's values."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.summaries: dict[fx.Node, _Summary] = {}

    @torch.no_grad()
    def summarize(self, inputs: Sequence[Tensor]) -> dict[fx.Node, _Summary]:
        self.run(*inputs)
        return self.summaries

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        values = [each.double() for each in tree_leaves(result) if isinstance(each, Tensor)]
        finite = [each.nan_to_num(0.0, 0.0, 0.0) for each in values]
        self.summaries[n] = _Summary(
            sums=tuple((float(each.sum()), float(each.abs().sum())) for one in finite for each in (one, one.square())),
            is_number=not any(bool(each.isnan().any()) for each in values),
            is_finite=all(bool(each.isfinite().all()) for each in values),
        )
        return result


def require_steady(program: Program, inputs: Sequence[Tensor], *, called: str = "noise") -> None:
    """Raise BadInput if two runs differ, NotFinite if outputs aren't finite; both name the operation."""
    first, second = (_Summarizer(program.graph).summarize(inputs) for _ in range(2))
    for node, summary in first.items():
        if not summary.is_like(second[node]):
            raise BadInput(
                f"{_describe(node)} gives different values at each call; expected a model that gives the same outputs "
                "for the same inputs: (a) give dropout training=self.training, (b) let no forward call train(), (c) "
                "take random numbers out of forward"
            )
    if not first[program.output].is_finite:
        causes = (node for node, summary in first.items() if not summary.is_number)
        raise NotFinite(f"{_describe(next(causes, program.output))} gives NaN or infinity on {called}")


def _describe(node: fx.Node) -> str:
    operation = str(node.target).removeprefix("aten.").partition(".")[0]
    path, kind = module_of(node)
    return f"{operation} in {f'{path} ({kind})' if path else 'forward'}"
