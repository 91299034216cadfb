"""Conversion of transformers' preprocessing of images (preprocessor_config.json) to timm's.

Images are resized to `size`, squashed or by their shorter edge, cropped to `crop_size` in the middle, scaled to 0..1
and normalised. A preprocessing that timm's evaluation transform can't do is refused.
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

Side = Annotated[int, Meta(ge=1, le=16_384)]
# msgspec 0.22 may crash on a fixed tuple of bounded numbers beside a bounded number.
Sides = Side | Annotated[tuple[Side, ...], Meta(min_length=2, max_length=2)]
# By PIL's numbers.
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5)


class _Size(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    height: Side | None = None
    width: Side | None = None
    shortest_edge: Side | None = None


class _Processor(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of preprocessor_config.json that are read."""

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
    """The preprocessing of images, and their height and width after it."""

    preprocessing: Preprocessing
    sides: tuple[int, int]


# The defaults of each processor, by the beginning of its class's name, and the processor of each type of model.
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


def both(sides: int | tuple[int, ...]) -> tuple[int, int]:
    """Return height and width; a single number is both."""
    height, width = sides if isinstance(sides, tuple) else (sides, sides)
    return height, width


def _family(content: Mapping[str, Any], model_type: str, where: str) -> str:
    """Return the beginning of the processor's class name. Raises BadInput for a processor that is not known here."""
    name = content.get("image_processor_type") or content.get("feature_extractor_type")
    if name is None and model_type in _OF_KIND:
        return _OF_KIND[model_type]
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
    """Return the `crop_pct` for which crop / crop_pct, rounded down as in timm, is the `size` before the crop."""
    share = crop / size
    while math.floor(crop / share) < size:
        share = math.nextafter(share, 0.0)
    return share


def _values(entry: tuple[float, ...] | float | None, identity: float, processor: _Processor) -> tuple[float, ...]:
    """Return a mean or std by channel, or one number for all; `identity` if there is no entry or no normalisation."""
    values = identity if entry is None or not processor.do_normalize else entry
    return values if isinstance(values, tuple) else (values,)


def has_default(model_type: str) -> bool:
    """Return whether the preprocessing of this type of model is known without a file."""
    return model_type in _OF_KIND


def prepared(content: Mapping[str, Any], model_type: str, *, where: str) -> Prepared:
    """Return images' preprocessing and sides by a file, {} for the default. Raises BadInput where timm can't do it."""
    family = _family(content, model_type, where)
    entries = {key: each for key, each in content.items() if each is not None}
    try:
        processor = msgspec.convert({**_PROCESSORS[family], **entries}, _Processor)
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}: not the preprocessing of a {model_type}: {str(error)[:300]}") from None
    if reason := _refusal(processor):
        raise BadInput(
            f"{where}: {reason}, which is not supported; preprocess the images yourself, or give another directory"
        )
    size, crops = processor.size, bool(processor.do_center_crop)
    assert size is not None, processor
    edge = None if isinstance(size, int) else size.shortest_edge
    shortest = family in _SHORTEST if isinstance(size, int) else edge is not None
    resized = _sides(edge or size, where)
    assert processor.crop_size is not None or not crops, processor
    sides = _sides(processor.crop_size, where) if crops and processor.crop_size is not None else resized
    shares = {share_of(crop, side) for crop, side in zip(sides, resized, strict=True)}
    if len(shares) > 1 or min(shares) <= 0.0 or max(shares) > 1.0 or (shortest and not crops):
        raise BadInput(
            f"{where}: images are resized to {resized}{' by the shorter edge' * shortest} and cropped to {sides}; "
            "expected a crop of the same share of both sides, and a crop after resizing by the shorter edge"
        )
    assert processor.resample is not None, processor
    return Prepared(
        preprocessing=Preprocessing(
            mean=_values(processor.image_mean, 0.0, processor),
            std=_values(processor.image_std, 1.0, processor),
            crop_pct=shares.pop(),
            interpolation=_RESAMPLING[processor.resample],
            crop_mode="center" if shortest else "squash",
        ),
        sides=sides,
    )
