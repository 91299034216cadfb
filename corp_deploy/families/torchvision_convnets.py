"""torchvision's convolutional networks as timm's models of the same architecture: names of models and of weights.
Imports neither library.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ground.errors import BadInput

from .torchvision_twin import Kind, Twin, crop_pct

if TYPE_CHECKING:
    from torch import Size, Tensor

FIRST = "IMAGENET1K_V1"


def _of(
    timm: str, kind: Kind, resized: int = 256, side: int = 224, interpolation: str = "bilinear", **kwargs: Any
) -> Twin:
    return Twin(
        timm=timm,
        kind=kind,
        crop_pct=crop_pct(resized, side),
        interpolation=interpolation,
        kwargs={"img_size": side, **kwargs},
        weights=FIRST,
    )


def _efficientnet(timm: str, side: int, resized: int, interpolation: str = "bicubic", **kwargs: Any) -> Twin:
    return _of(timm, "in order", resized, side, interpolation, **kwargs)


_HALF = (0.5, 0.5, 0.5)
_RESNETS = {
    name: _of(name, "resnet", 232 if name == "resnext101_64x4d" else 256)
    for name in (
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "resnext50_32x4d",
        "resnext101_32x8d",
        "resnext101_64x4d",
        "wide_resnet50_2",
        "wide_resnet101_2",
    )
}
_REGNETS = {
    f"regnet_{name}": _of(f"regnet{timm}", "regnet")
    for name, timm in {
        "x_400mf": "x_004_tv",
        "x_800mf": "x_008",
        "x_1_6gf": "x_016",
        "x_3_2gf": "x_032",
        "x_8gf": "x_080",
        "x_16gf": "x_160",
        "x_32gf": "x_320",
        "y_400mf": "y_004",
        "y_800mf": "y_008_tv",
        "y_1_6gf": "y_016",
        "y_3_2gf": "y_032",
        "y_8gf": "y_080_tv",
        "y_16gf": "y_160",
        "y_32gf": "y_320",
    }.items()
}
CONVNETS: Mapping[str, Twin] = {
    **_RESNETS,
    **_REGNETS,
    "regnet_y_128gf": replace(
        _of("regnety_1280", "regnet", 384, 384, "bicubic"), weights="IMAGENET1K_SWAG_E2E_V1"
    ),
    "mobilenet_v2": _of("mobilenetv2_100", "in order"),
    "mobilenet_v3_large": _of("mobilenetv3_large_100", "in order", bn_eps=1e-3),
    "mobilenet_v3_small": _of("mobilenetv3_small_100", "in order", bn_eps=1e-3),
    "efficientnet_b0": _efficientnet("efficientnet_b0", 224, 256),
    "efficientnet_b1": _efficientnet("efficientnet_b1", 240, 256),
    "efficientnet_b2": _efficientnet("efficientnet_b2", 288, 288),
    "efficientnet_b3": _efficientnet("efficientnet_b3", 300, 320),
    "efficientnet_b4": _efficientnet("efficientnet_b4", 380, 384),
    "efficientnet_b5": _efficientnet("efficientnet_b5", 456, 456, bn_eps=1e-3),
    "efficientnet_b6": _efficientnet("efficientnet_b6", 528, 528, bn_eps=1e-3),
    "efficientnet_b7": _efficientnet("efficientnet_b7", 600, 600, bn_eps=1e-3),
    "efficientnet_v2_s": _efficientnet("efficientnetv2_s", 384, 384, "bilinear", bn_eps=1e-3),
    "efficientnet_v2_m": _efficientnet("efficientnetv2_m", 480, 480, "bilinear", bn_eps=1e-3),
    "efficientnet_v2_l": replace(
        _efficientnet("efficientnetv2_l", 480, 480, bn_eps=1e-3), mean=_HALF, std=_HALF
    ),
}  # fmt: skip
_SECOND = (
    *(name for name in _RESNETS if name not in ("resnet18", "resnet34", "resnext101_64x4d")),
    *_REGNETS,
    "mobilenet_v2",
    "mobilenet_v3_large",
)
_SWAG = ("regnet_y_16gf", "regnet_y_32gf", "regnet_y_128gf")
_OTHERS = (
    (_SECOND, "IMAGENET1K_V2", 224, 232, "bilinear"),
    (("efficientnet_b1",), "IMAGENET1K_V2", 240, 255, "bilinear"),
    (_SWAG, "IMAGENET1K_SWAG_E2E_V1", 384, 384, "bicubic"),
    (_SWAG, "IMAGENET1K_SWAG_LINEAR_V1", 224, 224, "bicubic"),
)


def _prepared(twin: Twin, weights: str, side: int, resized: int, interpolation: str) -> Twin:
    kwargs = {**twin.kwargs, "img_size": side}
    percent = crop_pct(resized, side)
    return replace(twin, crop_pct=percent, interpolation=interpolation, kwargs=kwargs, weights=weights)


OTHER_WEIGHTS: Mapping[tuple[str, str], Twin] = {
    (name, weights): _prepared(CONVNETS[name], weights, side, resized, interpolation)
    for names, weights, side, resized, interpolation in _OTHERS
    for name in names
}
"""Those that take images prepared otherwise, by the names of torchvision's model and of the weights."""

_REGNET = {
    "stem.0": "stem.conv",
    "stem.1": "stem.bn",
    "fc": "head.fc",
    "proj.0": "downsample.conv",
    "proj.1": "downsample.bn",
    "f.a.0": "conv1.conv",
    "f.a.1": "conv1.bn",
    "f.b.0": "conv2.conv",
    "f.b.1": "conv2.bn",
    "f.c.0": "conv3.conv",
    "f.c.1": "conv3.bn",
    "f.se.fc1": "se.fc1",
    "f.se.fc2": "se.fc2",
}


def of_regnet(name: str) -> str | None:
    """timm's name of a weight; None for one that torchvision's model hasn't."""
    found = re.fullmatch(r"(?:trunk_output\.block(\d)\.block\d-(\d+)\.)?(.+)\.(\w+)", name)
    if found is None or found[3] not in _REGNET:
        return None
    block = f"s{found[1]}.b{int(found[2]) + 1}." if found[1] else ""
    return f"{block}{_REGNET[found[3]]}.{found[4]}"


def of_resnet(name: str) -> str | None:
    """Likewise: the same."""
    return name if re.match(r"(conv1|bn1|layer[1-4]\.\d+\.(conv\d|bn\d|downsample\.[01])|fc)\.\w+$", name) else None


def _place(module: str) -> tuple[bool, tuple[tuple[int, str], ...]]:
    """In the order that modules run: the classifier last, else by their numbers."""
    steps = ((int(step), "") if step.isdigit() else (-1, step) for step in module.split("."))
    return module.startswith("classifier"), tuple(steps)


def _modules(names: Iterable[str]) -> dict[str, set[str]]:
    """The weights of each module by the module's name, in the order of the names."""
    modules: dict[str, set[str]] = {}
    for name in names:
        module, _, own = name.rpartition(".")
        if own != "num_batches_tracked":
            modules.setdefault(module, set()).add(own)
    return modules


def in_order(state: "Mapping[str, Tensor]", expected: "Mapping[str, Size]", *, where: str) -> "dict[str, Tensor]":
    """Weights by timm's names, whose modules stand in the same order. Raises BadInput for those of another model."""
    theirs, ours = _modules(state), _modules(expected)
    pairs = list(zip(sorted(theirs, key=_place), ours, strict=False))
    if len(theirs) != len(ours) or any(theirs[their] != ours[our] for their, our in pairs):
        raise BadInput(
            f"{where}: {len(theirs)} modules from {next(iter(theirs), 'none')} on: no names of torchvision's weights "
            f"of this model; expected the state dict of torchvision.models, which has {len(ours)} modules with weights"
        )
    named: dict[str, Tensor] = {}
    for their, our in pairs:
        for own in theirs[their]:
            tensor, shape = state[f"{their}.{own}"], expected[f"{our}.{own}"]
            # A linear layer of what is pooled is a convolution of one place in timm's MobileNetV3.
            named[f"{our}.{own}"] = tensor[..., None, None] if len(shape) == tensor.ndim + 2 else tensor
    return named
