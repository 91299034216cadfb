"""timm's name of an architecture that torchvision has too, and how torchvision's weights of it take images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor
from typing import Any, Literal

Kind = Literal["vit", "swin", "swin v2", "resnet", "regnet", "in order"]
"""How timm names what torchvision names otherwise; in order: modules of the same kinds, one behind the other."""
Triple = tuple[float, float, float]

IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """timm's name of an architecture with the arguments that make it torchvision's, and how images of its own size
    are prepared. `weights`: torchvision's name of them, empty where there is one way to prepare images.
    """

    timm: str
    kind: Kind
    crop_pct: float
    interpolation: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    weights: str = ""


def crop_pct(resized: int, side: int = 224) -> float:
    """Of so many pixels, rounded down: timm takes the whole part of the side that it resizes to."""
    return floor(side / resized * 1e6) / 1e6
