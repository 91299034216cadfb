"""The architecture of a dense model as config.json records it, with preprocessing settings in timm's terms."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ground.errors import BadInput
from ground.quantity import DEVIATION, MEAN, SHARE_KEPT

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """Settings of the evaluation preprocessing; None leaves a value to timm's configuration of the model's name."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    crop_mode: str | None = None

    def __post_init__(self) -> None:
        for name, values, quantity in (("mean", self.mean, MEAN), ("std", self.std, DEVIATION)):
            if values is not None and not (values and all(map(quantity.holds, values))):
                raise BadInput(f"{name} is {values!r:.100}, expected {quantity} for all channels, or one for each")
        if self.crop_pct is not None and not SHARE_KEPT.holds(self.crop_pct):
            raise BadInput(f"crop_pct is {self.crop_pct!r}, expected {SHARE_KEPT}")
        for name, word, allowed in (
            ("interpolation", self.interpolation, INTERPOLATIONS),
            ("crop_mode", self.crop_mode, CROP_MODES),
        ):
            if word is not None and word not in allowed:
                raise BadInput(f"{name} is {word!r}, expected one of {', '.join(allowed)}")

    @property
    def settings(self) -> dict[str, Any]:
        """The values that are set, by timm's names."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def for_channels(self, channels: int) -> "Preprocessing":
        """Return a copy with a single mean and std repeated per channel; raise BadInput for other numbers of values."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, channels):
                expected = "1" if channels == 1 else f"1 or {channels}"
                raise BadInput(f"{name} has {len(values)} numbers, expected {expected}: one for each channel")
        return self.spread(channels)

    def spread(self, channels: int) -> "Preprocessing":
        """Return a copy with a single mean and std repeated per channel, other numbers of values unchanged."""
        mean, std = (each * channels if each and len(each) == 1 else each for each in (self.mean, self.std))
        return replace(self, mean=mean, std=std)


OF_TRANSFORMERS = "hf:"
"""The prefix of a model's name that is the path of a directory written by transformers."""
OF_TORCHVISION = "torchvision:"
"""The prefix of a torchvision model's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family's model by name and keyword arguments, with the settings of its preprocessing."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    family: str = "timm"
