"""What a model may be built with: bounded before anything is built, since ten million blocks would fill any memory."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ground.errors import BadInput
from ground.quantity import Count, Quantity, Real

_SIZE, _WIDTH = Count(low=1, high=16_384), Count(low=1, high=65_536)
BOUNDS: Mapping[str, Quantity] = MappingProxyType(
    {
        "depth": Count(low=1, high=256),
        "embed_dim": _WIDTH,
        "num_heads": Count(low=1, high=1024),
        "patch_size": _SIZE,
        "img_size": _SIZE,
        "in_chans": Count(low=1, high=1024),
        "num_classes": Count(low=0, high=10_000_000),
        "reg_tokens": Count(low=0, high=65_536),
        "mlp_ratio": Real(low=0.0, high=1024.0, low_open=True),
        "depths": Count(low=0, high=256),
        "window_size": _SIZE,
        "head_dim": _WIDTH,
        "embed_dims": _WIDTH,
        "stages": Count(low=0, high=256),
        "window_sizes": _SIZE,
    }
)
_LISTS = (
    "img_size",
    "patch_size",
    "num_heads",
    "mlp_ratio",
    "depths",
    "window_size",
    "head_dim",
    "embed_dim",
    "embed_dims",
    "stages",
    "window_sizes",
)
"""What may be a list, of sides or of what each stage has."""
_ANY = Real(low=-1e9, high=1e9)
_DEEPEST = 8


def _numbers(value: Any, depth: int = 0) -> Iterator[Any]:
    """The numbers in a value, lists and objects gone through; a depth beyond the limit counts as no number."""
    if depth > _DEEPEST:
        yield None
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(each, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def refuse_unbounded(kwargs: Mapping[str, Any]) -> None:
    """Raise BadInput for an argument that no model can be built with."""
    for key, value in kwargs.items():
        numbers = list(_numbers(value)) if isinstance(value, list | tuple) and key in _LISTS else [value]
        bound = BOUNDS.get(key)
        if bound is not None and value is not None and not all(map(bound.holds, numbers)):
            raise BadInput(f"--model-kwargs: {key} is {_cut(value)}, expected {bound}")
        if not all(map(_ANY.holds, _numbers(value))):
            raise BadInput(f"--model-kwargs: {_cut(key)} is {_cut(value)}, expected finite numbers, not nested deep")


def _cut(value: object) -> str:
    text = repr(value) if not isinstance(value, Mapping | list | tuple) else f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."
