"""scikit-learn's 1,797 handwritten digits as model input: upsampled, three equal channels, normalised; a fixed held-out split."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

IMAGE_SIZE = 32
MEAN, STD = 0.5, 0.5
HELD_OUT = 500
SPLIT_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """images [N,3,32,32] float32 in [-1, 1], labels [N] int64."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def _images_from_pixels(pixels_NHW: NDArray[np.float64]) -> NDArray[np.float32]:
    scaled = (pixels_NHW / 16.0 - MEAN) / STD
    factor = IMAGE_SIZE // pixels_NHW.shape[-1]
    large = scaled.repeat(factor, axis=1).repeat(factor, axis=2)
    return np.repeat(large[:, None], 3, axis=1).astype(np.float32)


def load(part: str) -> Digits:
    """`train` (1,297 images) or `held-out` (500 images): a seeded shuffle, the same on every machine."""
    if part not in ("train", "held-out"):
        raise ValueError(f"part of the digits: got {part!r}, expected 'train' or 'held-out'")
    digits = load_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(digits.target))
    chosen = order[HELD_OUT:] if part == "train" else order[:HELD_OUT]
    return Digits(images=_images_from_pixels(digits.images[chosen]), labels=digits.target[chosen].astype(np.int64))
