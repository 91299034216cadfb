"""How timm prepares images for a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import timm
from torch import Tensor

from ground.errors import BadInput
from ground.pixels import Normalisation
from ground.ports import Port, image_port
from ground.records import record_from_text, record_from_value

from .preprocessing import Preprocessing


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """What the model expects of an image: shape (channels, height, width) and timm's evaluation preprocessing."""

    shape: tuple[int, int, int]
    config: Mapping[str, Any]
    medium: Literal["images"] = "images"

    @property
    def ports(self) -> tuple[Port, ...]:
        return (image_port(self.shape),)

    @property
    def normalisation(self) -> Normalisation:
        """What is done to pixels, by channel. Raises BadInput where the preprocessing has other channels."""
        mean, std = (self._by_channel(name) for name in ("mean", "std"))
        return Normalisation(mean=mean, std=std)

    def _by_channel(self, name: str) -> tuple[float, ...]:
        values, channels = tuple(map(float, self.config[name])), self.shape[0]
        if len(values) not in (1, channels):
            raise BadInput(
                f"{name} has {len(values)} numbers, expected {channels}: one for each channel; give --{name}"
            )
        return values * (channels // len(values))

    def as_line(self) -> str:
        """The preprocessing for people."""
        config = self.config
        mean, std = (" ".join(f"{value:.4g}" for value in config[name]) for name in ("mean", "std"))
        size = "x".join(map(str, self.shape))
        crop = f"{config['interpolation']}, crop {config['crop_pct']:g} ({config['crop_mode']})"
        return f"{size}, {crop}, mean {mean}, std {std}"

    def as_json(self) -> dict[str, Any]:
        """The preprocessing as plain JSON values, in one order."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(self.config.items())}

    def transform(self) -> Callable[[Any], Tensor]:
        """timm's evaluation transform: an RGB image of PIL -> float32 [C,H,W]."""
        transform: Callable[[Any], Tensor] = timm.data.create_transform(**self.config, is_training=False)
        return transform


def image_spec_of_note(text: str, shape: tuple[int, int, int], *, where: str) -> ImageSpec:
    """What `as_json` wrote, as the text that a graph carries. Raises BadInput for another."""
    again = "export the model again"
    settings = record_from_text(text, dict[str, Any], where=f"{where}: its preprocessing", remedy=again)
    known = {name: value for name, value in settings.items() if name != "input_size"}
    prepared = record_from_value(known, Preprocessing, where=f"{where}: its preprocessing").for_channels(shape[0])
    return ImageSpec(shape=shape, config={"input_size": shape, **prepared.settings})
