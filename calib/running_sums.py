"""The sums that one site keeps while it listens, float64 by name, on the device that computes them."""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import fields
from typing import Any, Generic, Self

import torch
from torch import Tensor

from .axes import axes_of, shape_of, sums_of
from .moments import OneKind, SiteMoments
from .packed import SYMMETRIC
from .products import Weights, mirror_
from .sites import Role


class RunningSums(Generic[OneKind]):
    """`totals` become the fields of moments of one kind, and so do the `counts` of what was summed.

    `names` of the sums, beside those that the kind always has; `telling`: those that a NaN or an infinity stays in, of
    which symmetric ones tell by their diagonals.
    """

    def __init__(self, kind: type[OneKind], counts: Iterable[str], telling: Iterable[str], *names: str) -> None:
        self._kind, self._names, self._telling = kind, (*sums_of(kind), *names), tuple(telling)
        self.counts: dict[str, float] = dict.fromkeys(counts, 0)
        self.totals: dict[str, Tensor] = {}

    @property
    def tokens(self) -> float:
        return self.counts["tokens"]

    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Sums that have axes of known sizes alone, with nothing summed yet."""
        for name in self._names:
            if name not in self.totals and sizes.keys() >= set(axes_of(name)):
                self.totals[name] = torch.zeros(shape_of(name, sizes), dtype=torch.float64, device=device)

    def add(self, role: Role, activation: Tensor, weights: Weights | None = None) -> None:
        """Takes in what a forward pass brought; tokens count by their weights, if any."""
        raise NotImplementedError

    def flush(self) -> None:
        """Takes in what is held back."""

    def finite(self) -> Tensor:
        """Whether nothing infinite or NaN has entered."""
        totals = [(name, self.totals[name]) for name in self._telling]
        small = [each.diagonal(dim1=-2, dim2=-1) if name in SYMMETRIC else each for name, each in totals]
        return torch.stack([torch.isfinite(each).all() for each in small]).all()

    def load(self, moments: SiteMoments, device: torch.device) -> None:
        """Goes on from these, as copies on `device`."""
        assert isinstance(moments, self._kind), moments
        self.counts = {name: getattr(moments, name) for name in self.counts}
        values = {field.name: getattr(moments, field.name) for field in fields(moments)}
        self.totals = {
            name: value.to(device, copy=True)
            for name, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def beside(self) -> dict[str, Any]:
        """The fields of moments that are neither sums nor counts."""
        return {}

    def moments(self) -> OneKind:
        """Those so far, on the CPU; there they share memory with the sums."""
        values: dict[str, Any] = {**self.beside(), **self.counts, **on_host(self.totals)}
        return self._kind(**values)

    def copied(self) -> Self:
        """The same sums of their own, between two batches."""
        other = copy(self)
        other.totals = {name: total.clone() for name, total in self.totals.items()}
        other.counts = dict(self.counts)
        return other


def on_host(totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same on the CPU, symmetric ones mirrored in place; what is there already is not copied."""
    for name in SYMMETRIC & totals.keys():
        mirror_(totals[name])
    return {name: _from_gpu(total) if total.is_cuda else total.cpu() for name, total in totals.items()}


def _from_gpu(total: Tensor) -> Tensor:
    """By page-locked memory, which torch uses again for the next: three times as fast as into fresh pages."""
    return torch.empty(total.shape, dtype=total.dtype, pin_memory=True).copy_(total).clone()
