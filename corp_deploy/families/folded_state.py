"""Folding of weights that a state dict has in parts: pruning masks, weight norm and spectral norm."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ground.errors import BadInput

State = Mapping[str, Tensor]


def masked(original: Tensor, mask: Tensor) -> Tensor:
    """Return the weight of torch.nn.utils.prune."""
    return original * mask.to(original.dtype)


def weight_normed(magnitude: Tensor, direction: Tensor) -> Tensor:
    """Return the weight of weight norm: the direction, scaled to the magnitude over the axes where that has size 1."""
    if magnitude.ndim not in (0, direction.ndim):
        raise ValueError(f"magnitudes {list(magnitude.shape)} of a direction {list(direction.shape)}")
    axes = [axis for axis in range(direction.ndim) if magnitude.ndim == 0 or magnitude.shape[axis] == 1]
    length = torch.linalg.vector_norm(direction, dim=axes, keepdim=True) if axes else direction.abs()
    return direction * (magnitude / length)


def spectral_normed(original: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the weight of spectral norm: the original over the largest singular value, from its stored vectors."""
    for axis in range(original.ndim):
        rows = original.movedim(axis, 0).flatten(1)
        if rows.shape == (len(left), len(right)):
            return original / (left @ rows @ right)
    raise ValueError(f"vectors of {len(left)} and {len(right)} beside a weight {list(original.shape)}")


@dataclass(frozen=True, slots=True)
class _Form:
    """A way to keep a weight in parts."""

    label: str
    first: re.Pattern[str]
    """The pattern of the first part's name, with the groups `at` of the module's name and `name` of the weight's."""
    parts: tuple[str, ...]
    """The names of the parts, in the order in which `whole` takes them."""
    whole: Callable[..., Tensor]


def _first(ending: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<at>.*\.|)(?P<name>[^.]+)_{ending}")


def _original(ending: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<at>.*\.|)parametrizations\.(?P<name>[^.]+)\.{ending}")


_INSIDE = "{at}parametrizations.{name}."
_VECTORS = ("{at}{name}_orig", "{at}{name}_u", "{at}{name}_v")
_FORMS = (
    _Form("pruning masks", _first("orig"), ("{at}{name}_orig", "{at}{name}_mask"), masked),
    _Form("weight norm", _first("g"), ("{at}{name}_g", "{at}{name}_v"), weight_normed),
    _Form("spectral norm", _first("orig"), _VECTORS, spectral_normed),
    _Form("weight norm", _original("original0"), (f"{_INSIDE}original0", f"{_INSIDE}original1"), weight_normed),
    _Form(
        "spectral norm",
        _original("original"),
        (f"{_INSIDE}original", f"{_INSIDE}0._u", f"{_INSIDE}0._v"),
        spectral_normed,
    ),
)


def folded_state(state: State, *, where: str) -> tuple[State, dict[str, str]]:
    """Return a state dict with each weight in one tensor, and the form of each folded weight by its name.

    Raises BadInput for parts that don't fit one another.
    """
    whole, forms = dict(state), dict[str, str]()
    for form in _FORMS:
        for name in state:
            match = form.first.fullmatch(name)
            parts = [part.format(**match.groupdict()) for part in form.parts] if match else [""]
            if match is None or not all(part in whole for part in parts):
                continue
            folded = match["at"] + match["name"]
            try:
                whole[folded] = form.whole(*(whole.pop(part).detach() for part in parts))
            except (ValueError, RuntimeError) as error:
                raise BadInput(f"{where}: {folded}: {form.label} of shapes that don't fit ({error!s:.150})") from None
            forms[folded] = form.label
    return whole, forms
