"""Perceptual hashes: images that look alike have hashes that differ in few bits, whatever file, size or quality.

B images, C channels; 128 bits each, as two whole numbers. The bits say which of the lowest frequencies of the grey
image (discrete cosine transform, the mean left out) exceed their median, so contrast and brightness don't count.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

SIDE, FREQUENCIES, BITS = 32, 12, 128
ALIKE = 4
"""Bits in which two hashes of one picture differ at most. Of photographs saved again as JPEG of quality 75 nine in ten
stay within; different photographs differ in 36 or more. Drawings may be as near and yet be others: 2 of 500 digits of
8 x 8 pixels are. So this is a hint, never a proof.
Measured by benchmarks/quality/perceptual.py.
"""
_TIE = 1e-6  # of the largest frequency: what rounding may leave of one that is zero
_ROWS = 1024


def _cosines() -> Tensor:
    places = torch.arange(SIDE, dtype=torch.float64)[:, None] + 0.5
    return torch.cos(math.pi / SIDE * places * torch.arange(FREQUENCIES, dtype=torch.float64))


def perceptual_hashes(images_BCHW: Tensor) -> Tensor:
    """int64 [B,2] of images, preprocessed or not."""
    grey_BSS = adaptive_avg_pool2d(images_BCHW.double().mean(1, keepdim=True), SIDE)[:, 0]
    cosines_SF = _cosines()
    frequencies = (cosines_SF.T @ grey_BSS @ cosines_SF).flatten(1)[:, 1 : 1 + BITS]
    bound_B1 = frequencies.median(1, keepdim=True).values + _TIE * frequencies.abs().amax(1, keepdim=True)
    bits = (frequencies > bound_B1).reshape(-1, 2, 64).long()
    return (bits << torch.arange(64)).sum(2)


def _signs(hashes_N2: Tensor) -> Tensor:
    """1 and -1 of every bit [N,128], float32."""
    bits = (hashes_N2[:, :, None] >> torch.arange(64)) & 1
    return bits.flatten(1).float() * 2 - 1


def are_alike(hashes_N2: Tensor, others_M2: Tensor) -> Tensor:
    """Which of the images looks like one of the others, bool [N]."""
    others_MK = _signs(others_M2)
    nearest = [(_signs(rows_R2) @ others_MK.T).amax(1) for rows_R2 in hashes_N2.split(_ROWS) if len(others_M2)]
    return torch.cat(nearest) >= BITS - 2 * ALIKE if nearest else torch.zeros(len(hashes_N2), dtype=torch.bool)
