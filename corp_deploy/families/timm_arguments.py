"""timm's models built from arguments that are plain JSON values, and the arguments that a module shows.

Where timm takes code, JSON has names: `norm_layer` may be {"name": "layernorm", "eps": 1e-12}, `mlp_layer` one of MLPS,
and `head` one of HEADS, which timm itself does not have. Numbers are bounded before a model is built, since ten million
blocks would fill any memory.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, get_args

import msgspec
import timm
import torch
from timm.layers import Mlp, SwiGLU, SwiGLUPacked
from timm.layers.create_norm import get_norm_layer
from timm.models import build_model_with_cfg
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ground.errors import BadInput
from ground.quantity import Count, Quantity, Real

Head = Literal["projection", "class and patches"]
HEADS: tuple[Head, ...] = get_args(Head)
"""projection: a linear layer without a bias, whose outputs are an embedding. class and patches: a classifier of the
class token beside the mean of the patches, as DINOv2 evaluates (arXiv 2304.07193, section 7.1)."""

MLPS: Mapping[str, Callable[..., nn.Module]] = {"swiglu_packed": SwiGLUPacked, "swiglu": SwiGLU, "mlp": Mlp}


class _Norm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    eps: float


class ClassAndPatches(VisionTransformer):
    """A VisionTransformer whose classifier reads the class token and the mean of the patch tokens, concatenated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Average pooling marks timm's models that read patches; the norm stays before the pooling.
        super().__init__(*args, **{**kwargs, "global_pool": "avg", "fc_norm": False})
        if self.num_classes:
            self.head = nn.Linear(2 * self.embed_dim, self.num_classes)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits [B,classes] of normalised tokens [B,N,C], or the features [B,2C] before them."""
        features = torch.cat([x[:, 0], x[:, self.num_prefix_tokens :].mean(dim=1)], dim=1)
        return features if pre_logits else self.head(self.head_drop(features))


def _spelled(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    spelled = {key: value for key, value in kwargs.items() if key != "head"}
    if isinstance(spelled.get("norm_layer"), Mapping):
        norm = msgspec.convert(spelled["norm_layer"], _Norm)
        spelled["norm_layer"] = partial(get_norm_layer(norm.name), eps=norm.eps)
    if isinstance(name := spelled.get("mlp_layer"), str):
        layers = {each.replace("_", ""): layer for each, layer in MLPS.items()}
        bare = name.rpartition(".")[2].replace("_", "").lower()  # also the name of timm's class, with its module
        if bare not in layers:
            raise ValueError(f"mlp_layer is {name!r:.60}, expected one of {', '.join(MLPS)}")
        spelled["mlp_layer"] = layers[bare]
    return spelled


def build_from_arguments(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """Return timm's model on torch's default device, with initial weights. Raises any error for invalid arguments."""
    head, spelled = kwargs.get("head"), _spelled(kwargs)
    if head not in (None, *HEADS):
        raise ValueError(f"head is {head!r:.60}, expected one of {', '.join(HEADS)}")
    if head == "class and patches":
        return build_model_with_cfg(ClassAndPatches, name, pretrained=False, **spelled)
    model: nn.Module = timm.create_model(name, pretrained=False, **spelled)
    if head == "projection":
        assert isinstance(model, VisionTransformer), type(model)
        model.head = nn.Linear(model.embed_dim, model.num_classes, bias=False)
        model.num_classes = 0
    return model


_BOUNDS: Mapping[str, Quantity] = {
    **dict.fromkeys(("img_size", "patch_size", "window_size", "window_sizes"), Count(low=1, high=16_384)),
    **dict.fromkeys(("embed_dim", "embed_dims", "head_dim"), Count(low=1, high=65_536)),
    **dict.fromkeys(("depths", "stages"), Count(low=0, high=256)),
    "num_heads": Count(low=1, high=1024),
    "mlp_ratio": Real(low=0.0, high=1024.0, low_open=True),
    "depth": Count(low=1, high=256),
    "in_chans": Count(low=1, high=1024),
    "num_classes": Count(low=0, high=10_000_000),
    "reg_tokens": Count(low=0, high=65_536),
}
_PLAIN = ("depth", "in_chans", "num_classes", "reg_tokens")  # the arguments that can't be lists of sides or of stages
_ANY = Real(low=-1e9, high=1e9)
_DEEPEST = 8


def _numbers(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the numbers in a value, also in its lists and objects, and None for a value nested too deep."""
    if depth > _DEEPEST:
        yield None
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(each, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def refuse_unbounded(kwargs: Mapping[str, Any]) -> None:
    """Raise BadInput for a number that is out of its argument's bounds, not finite, beyond 1e9 or nested too deep."""
    for key, value in kwargs.items():
        numbers = list(_numbers(value)) if isinstance(value, list | tuple) and key not in _PLAIN else [value]
        bound = _BOUNDS.get(key)
        if bound is not None and value is not None and not all(map(bound.holds, numbers)):
            raise BadInput(f"--model-kwargs: {key} is {_cut(value)}, expected {bound}")
        if not all(map(_ANY.holds, _numbers(value))):
            raise BadInput(f"--model-kwargs: {_cut(key)} is {_cut(value)}, expected finite numbers, not nested deep")


def _cut(value: object) -> str:
    text = repr(value) if not isinstance(value, Mapping | list | tuple) else f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _attribute(model: nn.Module, path: str) -> Any:
    found: Any = model
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


_SHOWN: Mapping[str, Callable[[nn.Module], Any]] = {
    "depth": lambda model: len(_attribute(model, "blocks") or ()),
    "depths": lambda model: [len(_attribute(stage, "blocks") or ()) for stage in _attribute(model, "stages") or ()],
    "patch_size": lambda model: _attribute(model, "patch_embed.patch_size"),
    "num_heads": lambda model: _attribute(model, "blocks.0.attn.num_heads"),
    "mlp_ratio": lambda model: (_attribute(model, "blocks.0.mlp.fc1.out_features") or 0) / model.embed_dim,  # type: ignore[operator]
    "init_values": lambda model: 1.0 if _attribute(model, "blocks.0.ls1.gamma") is not None else None,
    "class_token": lambda model: _attribute(model, "cls_token") is not None,
    "reg_tokens": lambda model: (
        len(_attribute(model, "reg_token")[0]) if _attribute(model, "reg_token") is not None else 0
    ),
    "qk_norm": lambda model: not isinstance(_attribute(model, "blocks.0.attn.q_norm"), nn.Identity),
    "qkv_bias": lambda model: _attribute(model, "blocks.0.attn.qkv.bias") is not None,
}
"""The functions that read a transformer's constructor arguments from its other attributes, by argument."""


def _arguments_shown(model: nn.Module) -> dict[str, Any]:
    """Return the plain values of a model's attributes that are named like constructor arguments, or read by _SHOWN."""
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
    """Return the arguments in which a model visibly differs from the one that its name alone builds."""
    defaults = _arguments_shown(plain)
    return {name: value for name, value in _arguments_shown(model).items() if defaults.get(name) != value}
