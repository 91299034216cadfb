"""What may be set of how an image becomes a model's input, in timm's words. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from .errors import BadInput

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """The evaluation preprocessing; None leaves a value to timm's configuration of the model's name."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    crop_mode: str | None = None

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and not (values and all(map(isfinite, values))):
                raise BadInput(f"{name} is {values}, expected one finite number, or one for each channel")
        if self.std is not None and min(self.std) <= 0.0:
            raise BadInput(f"std is {self.std}, expected numbers above 0: pixels are divided by them")
        if self.crop_pct is not None and not 0.0 < self.crop_pct <= 1.0:
            raise BadInput(f"crop_pct is {self.crop_pct}, expected a share in (0, 1]")
        for name, word, known in (
            ("interpolation", self.interpolation, INTERPOLATIONS),
            ("crop_mode", self.crop_mode, CROP_MODES),
        ):
            if word is not None and word not in known:
                raise BadInput(f"{name} is {word!r}, expected one of {', '.join(known)}")

    @property
    def given(self) -> dict[str, Any]:
        """What is set, by timm's names."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def over(self, other: "Preprocessing") -> "Preprocessing":
        """These values, and the other's where none is set here."""
        return Preprocessing(**other.given | self.given)

    def for_channels(self, channels: int) -> "Preprocessing":
        """One mean and std for each channel. Raises BadInput when there are neither as many nor a single one."""
        mean = None if self.mean is None else _spread("mean", self.mean, channels)
        std = None if self.std is None else _spread("std", self.std, channels)
        return replace(self, mean=mean, std=std)


def _spread(name: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, channels):
        raise BadInput(f"{name} has {len(values)} numbers, expected 1 or {channels}: one for each channel")
    return values * (channels // len(values))


def preprocessing_from_json(record: Mapping[str, Any], *, where: str) -> Preprocessing:
    """The values of a record; what it doesn't have stays None. Raises BadInput for values of another type."""
    try:
        return Preprocessing(
            mean=_numbers(record.get("mean")),
            std=_numbers(record.get("std")),
            crop_pct=None if record.get("crop_pct") is None else float(record["crop_pct"]),
            interpolation=record.get("interpolation"),
            crop_mode=record.get("crop_mode"),
        )
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: {error}; the preprocessing there can't be used") from None


def _numbers(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(value) for value in values)
