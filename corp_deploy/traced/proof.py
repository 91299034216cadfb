"""Whether a narrowed program is the dense one with what is removed zeroed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from .compaction import kept
from .program import Inputs
from .sites import Found


class Masked(fx.Interpreter):
    """The dense program; what is removed is 0 wherever it would be summed over."""

    def __init__(self, found: Found, gone: Tensor) -> None:
        super().__init__(found.program.graph)
        self._masks: dict[fx.Node, list[tuple[fx.Node, tuple[int, ...], Tensor]]] = {}
        for hearing in found.flow.heard:
            keep = kept(found.flow.groups.of(hearing.labels), gone)
            if not bool(keep.all()):
                self._masks.setdefault(hearing.reader, []).append((hearing.source, hearing.axes, keep))

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What enters a node."""
        masks = self._masks.get(n)
        if masks is None:
            return super().fetch_args_kwargs_from_env(n)
        before = {source: self.env[source] for source, _, _ in masks}
        for source, axes, keep in masks:
            self.env[source] = zeroed(self.env[source], axes, keep)
        entering = super().fetch_args_kwargs_from_env(n)
        self.env |= before
        return entering


def zeroed(tensor: Tensor, axes: tuple[int, ...], keep: Tensor) -> Tensor:
    """0 where a mask [the sizes of axes] says so; an axis that counts the batch too has the mask as often."""
    order = sorted(range(len(axes)), key=lambda place: axes[place])
    sizes = [1] * tensor.dim()
    for place in order:
        sizes[axes[place]] = keep.shape[place]
    mask = keep.permute(order).reshape(sizes)
    times = [tensor.shape[dim] // sizes[dim] if sizes[dim] > 1 else 1 for dim in range(tensor.dim())]
    return tensor * mask.repeat(times).to(tensor)


def masked(found: Found, gone: Tensor) -> nn.Module:
    """The dense program with what goes zeroed."""
    interpreter = Masked(found, gone)

    class _Dense(nn.Module):
        def forward(self, *inputs: Any, **named: Any) -> Any:
            return interpreter.run(*inputs, *named.values())

    return _Dense()


def difference(found: Found, gone: Tensor, narrowed: nn.Module, inputs: Inputs) -> float:
    """The largest of any output between a narrowed program and the dense one with the same elements zeroed, relative
    to the largest value of that output; infinite for another shape.
    """
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    with torch.no_grad():
        dense = tree_leaves(masked(found, gone)(*args, **kwargs))
        given = tree_leaves(narrowed(*args, **kwargs))
    pairs = zip(dense, given, strict=True)
    return max((_apart(one, other) for one, other in pairs if isinstance(one, Tensor)), default=0.0)


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    one, other = one.double(), other.double()
    apart = (one - other).abs().max() / one.abs().max().clamp(min=1e-12)
    return float(apart) if bool(apart.isfinite()) else float("inf")
