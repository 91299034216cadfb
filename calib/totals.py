"""Float64 sums by name, as one site keeps them while it listens."""

from dataclasses import fields

import torch
from torch import Tensor

from .moments import SiteMoments
from .packed import SYMMETRIC
from .products import mirror_


def zeros(*shape: int, device: torch.device) -> Tensor:
    """Nothing summed yet."""
    return torch.zeros(shape, dtype=torch.float64, device=device)


def totals_of(moments: SiteMoments, device: torch.device) -> dict[str, Tensor]:
    """The sums of moments, as copies on `device`."""
    values = {field.name: getattr(moments, field.name) for field in fields(moments)}
    return {
        name: value.to(device, copy=True)
        for name, value in values.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def on_host(totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same on the CPU, symmetric ones mirrored in place; what is there already is not copied."""
    for name in SYMMETRIC & totals.keys():
        mirror_(totals[name])
    return {name: _from_gpu(total) if total.is_cuda else total.cpu() for name, total in totals.items()}


def _from_gpu(total: Tensor) -> Tensor:
    """By page-locked memory, which torch uses again for the next: three times as fast as into fresh pages."""
    return torch.empty(total.shape, dtype=total.dtype, pin_memory=True).copy_(total).clone()
