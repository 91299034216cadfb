"""A vision transformer of transformers in timm's words: its name and arguments, and how its images are prepared
(preprocessor_config.json).

Images are resized to `size`, squashed or by their shorter edge, cropped to `crop_size` in the middle, scaled to 0..1
and normalised. What timm's evaluation transform can't do is refused.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from corp_deploy.spec.architecture import Preprocessing
from ground.errors import BadInput

from .hf_config import ACTIVATIONS, Side, VisionModel

# PIL's numbers.
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5)


class _Size(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    height: Side | None = None
    width: Side | None = None
    shortest_edge: Side | None = None


class _Processor(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of preprocessor_config.json."""

    do_resize: bool = True
    do_center_crop: bool | None = None
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: Annotated[float, Meta(gt=0.0)] = 1 / 255
    size: Side | _Size | None = None
    crop_size: Side | _Size | None = None
    resample: int | None = None
    image_mean: tuple[float, ...] | float | None = None
    image_std: tuple[float, ...] | float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """How images are prepared, and their height and width then."""

    preprocessing: Preprocessing
    sides: tuple[int, int]


# What a processor does where its file doesn't say, by how its name begins, and which one a kind of model comes with.
_CROPPED = {"size": {"shortest_edge": 224}, "crop_size": 224, "do_center_crop": True, "resample": 3}
_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "ViT": {"size": 224, "resample": 2, "image_mean": _HALF, "image_std": _HALF},
    "DeiT": _CROPPED | {"size": 256, "image_mean": _IMAGENET_MEAN, "image_std": _IMAGENET_STD},
    "Bit": _CROPPED | {"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD},
    "CLIP": _CROPPED | {"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD},
    "Siglip": {"size": 224, "resample": 3, "image_mean": _HALF, "image_std": _HALF},
    "DINOv3ViT": {"size": 224, "resample": 2, "image_mean": _IMAGENET_MEAN, "image_std": _IMAGENET_STD},
}
_SHORTEST = ("CLIP", "Bit")  # processors whose plain `size` is the shorter edge
_OF_KIND = {
    "vit": "ViT",
    "deit": "DeiT",
    "dinov2": "Bit",
    "dinov2_with_registers": "Bit",
    "dinov3_vit": "DINOv3ViT",
    "clip": "CLIP",
    "clip_vision_model": "CLIP",
    "siglip": "Siglip",
    "siglip_vision_model": "Siglip",
}


def _family(content: Mapping[str, Any], model: VisionModel, where: str) -> str:
    """How the name of the processor begins. Raises BadInput for another library's or model's."""
    name = content.get("image_processor_type") or content.get("feature_extractor_type")
    if name is None:
        return _OF_KIND[model.config.model_type]
    match = re.fullmatch(r"(\w+?)(?:ImageProcessor|FeatureExtractor)(?:Fast|Pil)?", str(name))
    if match is None or match[1] not in _PROCESSORS:
        raise BadInput(f"{where}: images are prepared by {name!r:.60}, expected one of {', '.join(_PROCESSORS)}")
    return match[1]


def _sides(size: int | _Size, where: str) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if size.height is None or size.width is None:
        raise BadInput(f"{where}: a size without height and width, expected both")
    return size.height, size.width


def _refusal(processor: _Processor) -> str:
    reasons = {
        "do_resize is false": not processor.do_resize,
        "do_rescale is false, so that pixels are 0 to 255": not processor.do_rescale,
        f"rescale_factor is {processor.rescale_factor:g}, expected 1/255": (
            not math.isclose(processor.rescale_factor, 1 / 255, rel_tol=1e-3)
        ),
        f"resample is {processor.resample}, expected one of {', '.join(map(str, _RESAMPLING))}": (
            processor.resample not in _RESAMPLING
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def share_of(crop: int, size: int) -> float:
    """The `crop_pct` of which timm makes a size to resize to before the crop, rounding down."""
    share = crop / size
    while math.floor(crop / share) < size:
        share = math.nextafter(share, 0.0)
    return share


def _resize(processor: _Processor, family: str, where: str) -> tuple[tuple[int, int], bool]:
    size = processor.size
    assert size is not None, processor
    if isinstance(size, int):
        return (size, size), family in _SHORTEST
    if size.shortest_edge is not None:
        return (size.shortest_edge, size.shortest_edge), True
    return _sides(size, where), False


def _values(
    entry: tuple[float, ...] | float | None, identity: float, processor: _Processor, model: VisionModel
) -> tuple[float, ...]:
    """One for each channel, or those of a preparation for other images."""
    values = identity if entry is None or not processor.do_normalize else entry
    values = values if isinstance(values, tuple) else (values,)
    return values * model.config.num_channels if len(values) == 1 else values


def prepared(content: Mapping[str, Any], model: VisionModel, *, where: str) -> Prepared:
    """What a preprocessor_config.json says; an empty one is what the model's class does by itself.

    Raises BadInput for what timm's evaluation transform does not do.
    """
    family, entries = _family(content, model, where), {key: each for key, each in content.items() if each is not None}
    try:
        processor = msgspec.convert({**_PROCESSORS[family], **entries}, _Processor)
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}: not the preparation of a {model.architecture}: {str(error)[:300]}") from None
    if reason := _refusal(processor):
        raise BadInput(
            f"{where}: {reason}, which is not supported; preprocess the images yourself, or give another directory"
        )
    resized, shortest = _resize(processor, family, where)
    crops = bool(processor.do_center_crop)
    assert processor.crop_size is not None or not crops, processor
    sides = _sides(processor.crop_size, where) if crops and processor.crop_size is not None else resized
    shares = {share_of(crop, size) for crop, size in zip(sides, resized, strict=True)}
    if len(shares) > 1 or min(shares) <= 0.0 or max(shares) > 1.0 or (shortest and not crops):
        raise BadInput(
            f"{where}: images are resized to {resized}{' by the shorter edge' * shortest} and cropped to {sides}; "
            "expected a crop of one share of both sides, and one after resizing by the shorter edge"
        )
    assert processor.resample is not None, processor
    return Prepared(
        preprocessing=Preprocessing(
            mean=_values(processor.image_mean, 0.0, processor, model),
            std=_values(processor.image_std, 1.0, processor, model),
            crop_pct=shares.pop(),
            interpolation=_RESAMPLING[processor.resample],
            crop_mode="center" if shortest else "squash",
        ),
        sides=sides,
    )


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
