"""The 1,797 handwritten digits of scikit-learn as model inputs, upsampled and normalised, with a fixed split."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch.nn import functional as F

IMAGE_SIZE = 32
MEAN, STD = 0.5, 0.5
HELD_OUT = 500
SPLIT_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images [N,3,32,32], float32 in [-1, 1], of three equal channels, and labels [N], int64."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def _images_from_pixels(pixels_NHW: NDArray[np.float64]) -> NDArray[np.float32]:
    scaled = torch.from_numpy((pixels_NHW / 16.0 - MEAN) / STD)[:, None]
    large = F.interpolate(scaled, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    return large.expand(-1, 3, -1, -1).contiguous().to(torch.float32).numpy()


def load_part(part: str) -> Digits:
    """Return the part "train" (1,297 images) or "held-out" (500 images) of the digits, in a seeded shuffle."""
    if part not in ("train", "held-out"):
        raise ValueError(f"part of the digits: got {part!r}, expected 'train' or 'held-out'")
    digits = load_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(digits.target))
    chosen = order[HELD_OUT:] if part == "train" else order[:HELD_OUT]
    return Digits(images=_images_from_pixels(digits.images[chosen]), labels=digits.target[chosen].astype(np.int64))
