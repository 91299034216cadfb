"""What a timm model may be built with, bounded before that, since ten million blocks would fill any memory; and what a
module shows of it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

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


def _first(model: nn.Module, path: str) -> Any:
    """What stands there; None where nothing does."""
    found: Any = model
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


_SHOWN: Mapping[str, Callable[[nn.Module], Any]] = MappingProxyType(
    {
        "depth": lambda model: len(_first(model, "blocks") or ()),
        "depths": lambda model: [len(_first(stage, "blocks") or ()) for stage in _first(model, "stages") or ()],
        "patch_size": lambda model: _first(model, "patch_embed.patch_size"),
        "num_heads": lambda model: _first(model, "blocks.0.attn.num_heads"),
        "mlp_ratio": lambda model: (_first(model, "blocks.0.mlp.fc1.out_features") or 0) / model.embed_dim,  # type: ignore[operator]
        "init_values": lambda model: 1.0 if _first(model, "blocks.0.ls1.gamma") is not None else None,
        "class_token": lambda model: _first(model, "cls_token") is not None,
        "reg_tokens": lambda model: len(_first(model, "reg_token")[0]) if _first(model, "reg_token") is not None else 0,
        "qk_norm": lambda model: not isinstance(_first(model, "blocks.0.attn.q_norm"), nn.Identity),
        "qkv_bias": lambda model: _first(model, "blocks.0.attn.qkv.bias") is not None,
    }
)
"""Of a transformer's arguments those that leave a trace of another name."""


def _arguments_shown(model: nn.Module) -> dict[str, Any]:
    """Of its constructor's arguments those that it shows as plain values; which ones mean what they say, a model built
    of them shows.
    """
    shown = dict[str, Any]()
    for name in inspect.signature(type(model).__init__).parameters:
        try:
            value = _SHOWN[name](model) if name in _SHOWN else getattr(model, name, None)
        except (AttributeError, TypeError, IndexError, ZeroDivisionError):
            continue
        value = list(value) if isinstance(value, tuple) else value
        if isinstance(value, bool | int | float | str | list):
            shown[name] = value
    return shown


def arguments_beside(model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """The arguments in which a model differs from the one that its name alone makes, as far as it shows them."""
    defaults = _arguments_shown(plain)
    return {name: value for name, value in _arguments_shown(model).items() if defaults.get(name) != value}
