"""Arguments of timm's VisionTransformer that a state dict shows by its names and shapes, proved by building it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from corp_deploy.spec.architecture import Architecture
from ground.errors import BadInput

from . import timm_library

State = Mapping[str, Tensor]
_OLD_NAMES = (
    (r"\.gamma_([12])$", r".ls\1.gamma"),
    (r"^register_tokens$", "reg_token"),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)
_USUAL_HEAD = 64
_TRAINING = ("mask_token", "rope_embed.periods")


@dataclass(frozen=True, slots=True)
class Fitting:
    """Arguments of a model that fits a state dict; `assumed` lists those that weights don't show, with reasons."""

    arguments: dict[str, Any]
    assumed: list[str] = field(default_factory=list)


def _side(state: State, patch: int, front: int) -> tuple[int | None, bool]:
    """Return the image side that `pos_embed` covers, None if unknown, and whether tokens in front have no positions."""
    positions = state.get("pos_embed")
    count = positions.shape[1] if positions is not None and positions.ndim == 3 else 0
    for own in (front, 1 if "cls_token" in state else 0, 0):
        grid = isqrt(max(count - own, 0))
        if grid and grid * grid == count - own:
            return grid * patch, own < front
    return None, False


def arguments_of_weights(state: State) -> dict[str, Any] | None:
    """Return the arguments that a VisionTransformer's state dict shows; None for another model's."""
    for old, new in _OLD_NAMES:
        state = {re.sub(old, new, name): tensor for name, tensor in state.items()}
    patches, first = state.get("patch_embed.proj.weight"), state.get("blocks.0.norm1.weight")
    if patches is None or patches.ndim != 4 or first is None or "blocks.0.attn.qkv.weight" not in state:
        return None
    width, channels, patch, _ = patches.shape
    blocks = {int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.", name))}
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    side, is_embedded_alone = _side(state, patch, ("cls_token" in state) + registers)
    shown: dict[str, Any] = {
        "img_size": side,
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": width,
        "depth": max(blocks) + 1,
        "num_classes": len(state["head.weight"]) if "head.weight" in state else 0,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "class_token": "cls_token" in state,
        "reg_tokens": registers,
        "no_embed_class": is_embedded_alone,
        "pre_norm": "norm_pre.weight" in state,
        "global_pool": _pool(state),
    }
    return {**shown, **_mlp(state, width)}


def _pool(state: State) -> str:
    if "attn_pool.q.weight" in state:
        return "map"
    return "avg" if "fc_norm.weight" in state or "cls_token" not in state else "token"


def _mlp(state: State, width: int) -> dict[str, Any]:
    into, out = state.get("blocks.0.mlp.fc1.weight"), state.get("blocks.0.mlp.fc2.weight")
    if "blocks.0.mlp.fc1_g.weight" in state and out is not None:
        return {"mlp_layer": "swiglu", "mlp_ratio": out.shape[1] / width}
    if into is None or out is None:
        return {}
    is_packed = len(into) == 2 * out.shape[1]
    return {
        "mlp_ratio": len(into) / width,
        **({"mlp_layer": "swiglu_packed", "act_layer": "silu"} if is_packed else {}),
    }


def _own_heads(model: VisionTransformer) -> int:
    block: Any = model.blocks[0]
    return int(block.attn.num_heads)


def _heads(model: VisionTransformer, state: State, width: int, kwargs: Mapping[str, Any]) -> int:
    """Return the number of heads: by the norm of queries, else the model's own, else by a usual width of heads."""
    own = _own_heads(model)
    norm = state.get("blocks.0.attn.q_norm.weight")
    if norm is not None and width % len(norm) == 0:
        return width // len(norm)
    if ("num_heads" in kwargs or width == model.embed_dim) and width % own == 0:
        return own
    head = model.embed_dim // own
    return next((width // each for each in (head, _USUAL_HEAD) if width % each == 0), own if width % own == 0 else 1)


def fitting_arguments(model: nn.Module, name: str, state: State, kwargs: Mapping[str, Any]) -> Fitting | None:
    """Return arguments with which timm's model of this name fits a state dict, proved by building it on meta.

    `kwargs` are those of `model`, which does not fit. The result is None where the model is no VisionTransformer, and
    where the arguments that the state dict shows don't make it fit.
    """
    theirs, ours = arguments_of_weights(state), arguments_of_weights(model.state_dict())
    if theirs is None or ours is None or not isinstance(model, VisionTransformer):
        return None
    changed = {key: value for key, value in theirs.items() if value is not None and ours.get(key, ()) != value}
    if "img_size" in kwargs or model.patch_embed.img_size is None:
        changed.pop("img_size", None)
    absent = {key: None for key in ("init_values", "mlp_layer", "act_layer") if kwargs.get(key) and not theirs.get(key)}
    arguments = {key: value for key, value in {**kwargs, **changed}.items() if key not in absent}
    assumed, width = [], theirs["embed_dim"]
    heads = _heads(model, state, width, kwargs)
    if "embed_dim" in changed or heads != _own_heads(model):
        arguments["num_heads"] = heads
        if "blocks.0.attn.q_norm.weight" not in state:
            assumed.append(f"num_heads {heads} (heads of {width // heads}; weights don't tell how many)")
    if "act_layer" in changed and "act_layer" not in kwargs:
        assumed.append("act_layer silu (weights don't tell the activation)")
    return Fitting(arguments, assumed) if _fits(name, arguments, state) else None


def _fits(name: str, arguments: Mapping[str, Any], state: State) -> bool:
    """Return whether a model of these arguments has the names and shapes of a state dict after timm's filter."""
    try:
        with torch.device("meta"):
            built = timm_library.build_timm_model(Architecture(name=name, kwargs=arguments))
        adapted = timm_library.filter_state(built, state)
    except (BadInput, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError):
        return False
    unused = (*timm_library.unused(built), *_TRAINING)
    shapes = {name: tensor.shape for name, tensor in adapted.items() if not name.startswith(unused)}
    return shapes == {name: tensor.shape for name, tensor in built.state_dict().items()}
