"""Conversion between pixels, 0 to 255, and the normalised images that models are trained on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BadInput

PIXEL, LARGEST = "uint8", 255
_ROUNDING = 0.01  # of the step between two pixel values; a round trip through float32 loses a thousandth of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """image = (pixel / 255 - mean) / std, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.mean) == len(self.std), self
        assert min(self.std, default=0.0) > 0, self

    def images(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return pixels [..., C, H, W] as float32 images, bit for bit as torchvision's ToTensor and Normalize do."""
        mean, std = _by_channel(self.mean, np.float32), _by_channel(self.std, np.float32)
        images: NDArray[np.float32] = (pixels.astype(np.float32) / np.float32(LARGEST) - mean) / std
        return images

    def pixels(self, images: NDArray[np.floating]) -> NDArray[np.uint8]:
        """Return images [..., C, H, W] as pixels, rounded and clipped to 0 to 255."""
        return np.clip(np.rint(self._unrounded_pixels(images)), 0, LARGEST).astype(np.uint8)

    def require_pixels(self, images: NDArray[np.floating], *, where: str) -> None:
        """Raise BadInput unless all images are normalised whole pixels from 0 to 255."""
        for place, image in enumerate(images):  # one at a time, because they may be mapped from disk
            real = self._unrounded_pixels(image)
            off = float(np.abs(real - np.clip(np.rint(real), 0, LARGEST)).max())
            if not off <= _ROUNDING:
                raise BadInput(
                    f"{where}: image {place} is {off:.3g} away from pixels 0 to 255 normalised by mean "
                    f"{_shown(self.mean)} and std {_shown(self.std)}, which a graph with uint8 input takes; give image "
                    "files, or uint8 arrays"
                )

    def _unrounded_pixels(self, images: NDArray[np.floating]) -> NDArray[np.float64]:
        mean, std = _by_channel(self.mean, np.float64), _by_channel(self.std, np.float64)
        real: NDArray[np.float64] = (images * std + mean) * LARGEST
        return real


def _by_channel(values: tuple[float, ...], dtype: Any) -> NDArray[Any]:
    return np.asarray(values, dtype=dtype)[:, None, None]


def _shown(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def whole_pixels(values: NDArray[Any], *, where: str) -> NDArray[np.uint8]:
    """Return whole values 0 to 255 of any type as uint8. Raises BadInput for other values."""
    pixels = values.astype(np.uint8)
    if not np.array_equal(pixels, values):
        raise BadInput(
            f"{where}: expected pixels 0 to 255, which the graph normalises itself, got {values.min():.4g} to "
            f"{values.max():.4g}; give uint8 arrays"
        )
    return pixels
