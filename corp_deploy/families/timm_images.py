"""timm's preprocessing of images for a model.

A mean and a std have one number for each channel. Values for another number of channels, such as the three colours of a
name's tag for a model of grey images, are never applied, and never written as the model's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import timm
from torch import Tensor

from corp_deploy.spec.architecture import Preprocessing
from ground.errors import BadInput
from ground.pixels import Normalisation
from ground.ports import Port, image_port
from ground.records import record_from_text, record_from_value

BY_CHANNEL = ("mean", "std")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """The images of a model: their shape (channels, height, width) and timm's evaluation preprocessing.

    The mean and the std in `config` may be for another number of channels.
    """

    shape: tuple[int, int, int]
    config: Mapping[str, Any]
    medium: ClassVar[Literal["images", "text", "arrays"]] = "images"

    @property
    def ports(self) -> tuple[Port, ...]:
        return (image_port(self.shape),)

    @property
    def normalisation(self) -> Normalisation:
        """The normalisation of pixels by channel. Raises BadInput as require_normalisation does."""
        self.require_normalisation(where="the model's preprocessing")
        mean, std = (tuple(map(float, self.config[name])) for name in BY_CHANNEL)
        return Normalisation(mean=mean, std=std)

    def require_normalisation(self, *, where: str, instead: str = "") -> None:
        """Raise BadInput where no mean or no std for the model's channels is known; `instead` is another remedy."""
        if not self.normalisation_refusal:
            return
        channels, height, width = self.shape
        arrays = f".npy, .npz or .safetensors with images [N,{channels},{height},{width}] float32, preprocessed"
        raise BadInput(
            f"{where}: pixels can't be normalised for a model of {_channels(channels)}: {self.normalisation_refusal}; "
            f"give --mean and --std for {_channels(channels)} where the model is named with its weights, or "
            f"{instead or arrays}"
        )

    @property
    def normalisation_refusal(self) -> str:
        """The reason why pixels can't be normalised; empty where mean and std fit the model's channels."""
        own = self._fitting
        return "" if all(name in own for name in BY_CHANNEL) else " and ".join(map(self._source_of, BY_CHANNEL))

    def _source_of(self, name: str) -> str:
        values = self.config.get(name)
        return f"its {name}, {_shown(values)}, is of {_channels(len(values))}" if values else f"it has no {name}"

    @property
    def _fitting(self) -> dict[str, Any]:
        """The preprocessing without a mean or a std for another number of channels."""

        def fits(value: Any) -> bool:
            return isinstance(value, list | tuple) and len(value) == self.shape[0]

        return {name: value for name, value in self.config.items() if name not in BY_CHANNEL or fits(value)}

    def as_line(self) -> str:
        config = self._fitting
        size = "x".join(map(str, self.shape))
        crop = f"{config['interpolation']}, crop {config['crop_pct']:g} ({config['crop_mode']})"
        values = [f"{name} {_shown(config[name])}" if name in config else f"no {name}" for name in BY_CHANNEL]
        return f"{size}, {crop}, {', '.join(values)}"

    def as_json(self) -> dict[str, Any]:
        """Return the preprocessing as plain JSON values, sorted, without a mean or std for other channels."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(self._fitting.items())}

    def transform(self) -> Callable[[Any], Tensor]:
        """Return timm's evaluation transform, PIL image -> float32 [C,H,W]. Raises as require_normalisation does."""
        self.require_normalisation(where="pictures")
        return timm.data.create_transform(**self.config, is_training=False)


def _channels(count: int) -> str:
    return f"{count} channel{'s'[: count > 1]}"


def _shown(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def image_spec_of_note(text: str, shape: tuple[int, int, int], *, where: str) -> ImageSpec:
    """Return the spec of images by a graph's preprocessing, JSON of `as_json`. Raises BadInput for any other text."""
    again = "export the model again"
    settings = record_from_text(text, dict[str, Any], where=f"{where}: its preprocessing", remedy=again)
    overrides = {name: value for name, value in settings.items() if name != "input_size"}
    prepared = record_from_value(overrides, Preprocessing, where=f"{where}: its preprocessing").spread(shape[0])
    return ImageSpec(shape=shape, config={"input_size": shape, **prepared.settings})
