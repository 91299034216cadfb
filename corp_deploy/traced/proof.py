"""Whether a narrowed program is the dense one with what is removed zeroed."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from .compaction import kept
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
        def forward(self, *inputs: Any) -> Any:
            return interpreter.run(*inputs)

    return _Dense()
