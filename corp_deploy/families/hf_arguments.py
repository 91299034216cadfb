"""timm's name and arguments for a vision transformer of transformers."""

import math
from collections.abc import Mapping
from typing import Any

from ground.errors import BadInput

from .hf_config import ACTIVATIONS, VisionModel


def ratio_of(hidden: int, width: int) -> float:
    """The `mlp_ratio` of which timm makes this hidden width, truncating the product."""
    ratio = hidden / width
    while int(width * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _head_arguments(model: VisionModel) -> dict[str, Any]:
    if model.output == "projection":
        assert model.config.projection_dim is not None, model
        return {"num_classes": model.config.projection_dim, "head": "projection"}
    if model.output == "class and patches":
        return {"num_classes": model.classes, "head": "class and patches"}
    return {"num_classes": model.classes if model.output in ("classes", "distilled") else 0}


def _kind_arguments(model: VisionModel) -> dict[str, Any]:
    """What a kind has beside the plain ViT with a class token."""
    config = model.config
    own: Mapping[str, dict[str, Any]] = {
        "vit": {},
        # Without a head of its own the distillation token is read by nobody, as a register.
        "deit": {} if model.output == "distilled" else {"reg_tokens": 1},
        "dinov2": {"init_values": 1.0},
        "dinov2_with_registers": {"init_values": 1.0, "reg_tokens": config.num_register_tokens, "no_embed_class": True},
        "clip": {"pre_norm": True},
        "siglip": {"class_token": False, "global_pool": "map"},
    }
    return own[config.model_type.removesuffix("_vision_model")]


def timm_name(model: VisionModel) -> str:
    """timm's name of such a model, of which its arguments change the widths."""
    return "deit_base_distilled_patch16_224" if model.output == "distilled" else model.kind.timm


def _eva_arguments(model: VisionModel) -> dict[str, Any]:
    """What a model whose positions turn has where timm's VisionTransformer has an activation and its biases; of timm's
    attentions one that has a bias of keys too, which turn with them.
    """
    config = model.config
    return {
        "attn_type": "rope",
        "qkv_bias": config.query_bias or config.key_bias or config.value_bias,
        "swiglu_mlp": config.use_gated_mlp,
        "swiglu_align_to": 0,
        "init_values": 1.0,
        "num_reg_tokens": config.num_register_tokens,
        "rope_temperature": config.rope_theta,
        "global_pool": "token",
        "num_classes": 0,
    }


def _vit_arguments(model: VisionModel) -> dict[str, Any]:
    config = model.config
    swiglu = {"mlp_layer": "swiglu_packed", "act_layer": "silu"} if config.use_swiglu_ffn else {}
    return {
        "qkv_bias": config.qkv_bias,
        "act_layer": ACTIVATIONS[config.hidden_act],
        **swiglu,
        **_kind_arguments(model),
        **_head_arguments(model),
    }


def timm_arguments(model: VisionModel, sides: tuple[int, int]) -> dict[str, Any]:
    """All that timm builds the same model from, for images of these sides. Raises BadInput for parts of a patch where
    positions are of whole ones.
    """
    config = model.config
    if config.has_rope and any(side % patch for side, patch in zip(sides, config.patch, strict=True)):
        raise BadInput(f"images of {sides} are no whole patches of {config.patch}; give img_size")
    return {
        "img_size": list(sides),
        "patch_size": list(config.patch),
        "in_chans": config.num_channels,
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": ratio_of(config.hidden, config.hidden_size),
        "norm_layer": {"name": "layernorm", "eps": config.layer_norm_eps},
        **(_eva_arguments(model) if config.has_rope else _vit_arguments(model)),
    }
