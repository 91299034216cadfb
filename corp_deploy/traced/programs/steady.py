"""Check that two runs of a program give the same finite outputs, and name the first operation that doesn't."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ground.errors import BadInput

from .program import Program, module_of


class NotFinite(BadInput):
    """A program gives NaN or infinity on these inputs."""


ROUNDING = 1e-6
"""Relative to the sum of magnitudes. Rounding in another order, as on GPUs, changes a sum by less; noise by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """A node's finite values in short, as pairs of a sum and the sum of magnitudes, and whether all are finite."""

    sums: tuple[tuple[float, float], ...]
    is_number: bool
    is_finite: bool

    def is_like(self, other: "_Summary") -> bool:
        """Return whether the sums differ by no more than rounding."""
        pairs = zip(self.sums, other.sums, strict=True)
        return all(abs(one - two) <= ROUNDING * magnitude for (one, magnitude), (two, _) in pairs)


class _Watched(fx.Interpreter):
    """Run a program and keep in short what each node gives."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.summaries: dict[fx.Node, _Summary] = {}

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
    first, second = (_summaries(program, inputs) for _ in range(2))
    for node, summary in first.items():
        if not summary.is_like(second[node]):
            raise BadInput(
                f"{_name(node)} gives other values at each call; expected a model that gives the same outputs "
                "for the same inputs: (a) give dropout training=self.training, (b) let no forward call train(), (c) "
                "take random numbers out of forward"
            )
    if not first[program.output].is_finite:
        causes = (node for node, summary in first.items() if not summary.is_number)
        raise NotFinite(f"{_name(next(causes, program.output))} gives NaN or infinity on {called}")


def _summaries(program: Program, inputs: Sequence[Tensor]) -> dict[fx.Node, _Summary]:
    watched = _Watched(program.graph)
    with torch.no_grad():
        watched.run(*inputs)
    return watched.summaries


def _name(node: fx.Node) -> str:
    operation = str(node.target).removeprefix("aten.").partition(".")[0]
    path, kind = module_of(node)
    return f"{operation} in {f'{path} ({kind})' if path else 'forward'}"
