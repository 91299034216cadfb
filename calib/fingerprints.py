"""Digests of inputs' contents, and perceptual hashes of images.

Bit i of a hash is set where the i-th of 128 low frequencies (DCT of the grey image without its mean) exceeds their
median.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ground.errors import BadInput

SIDE, FREQUENCIES, BITS = 32, 12, 128
ALIKE = 4
"""Number of bits up to which two hashes count as one picture. Nine in ten photographs saved again as JPEG of quality 75
differ by no more; different photographs differ by 36 or more. Different drawings may be as near (2 of 500 digits of 8 x
8 pixels are), so this is a hint, never a proof. docs/measured/tried.md has the figures.
"""
_TIE = 1e-6  # rounding error of a zero frequency, relative to the largest one
_ROWS = 1024


def perceptual_hashes(images_BCHW: Tensor) -> Tensor:
    grey_BSS = adaptive_avg_pool2d(images_BCHW.double().mean(1, keepdim=True), SIDE)[:, 0]
    places = torch.arange(SIDE, dtype=torch.float64)[:, None] + 0.5
    cosines_SF = torch.cos(math.pi / SIDE * places * torch.arange(FREQUENCIES, dtype=torch.float64))
    frequencies = (cosines_SF.T @ grey_BSS @ cosines_SF).flatten(1)[:, 1 : 1 + BITS]
    bound_B1 = frequencies.median(1, keepdim=True).values + _TIE * frequencies.abs().amax(1, keepdim=True)
    bits = (frequencies > bound_B1).reshape(-1, 2, 64).long()
    return (bits << torch.arange(64)).sum(2)


def _signs(hashes_N2: Tensor) -> Tensor:
    bits = (hashes_N2[:, :, None] >> torch.arange(64)) & 1
    return bits.flatten(1).float() * 2 - 1


def first_alike(hashes_N2: Tensor) -> Tensor:
    """Return for each hash the first position of those that count as one picture, also transitively, int64 [N].

    Memory grows with N alone: frames of a still film all look like each other.
    """
    distinct_M2, place_N = hashes_N2.unique(dim=0, return_inverse=True)
    signs_MK, group_M = _signs(distinct_M2), torch.arange(len(distinct_M2))
    for start in range(0, len(distinct_M2), _ROWS):
        alike_RM = signs_MK[start : start + _ROWS] @ signs_MK.T >= BITS - 2 * ALIKE
        for alike_M in alike_RM[alike_RM.sum(1) > 1]:
            groups = group_M[alike_M].unique()
            if len(groups) > 1:
                group_M[torch.isin(group_M, groups)] = groups[0]
    group_N = group_M[place_N]
    first_M = torch.full_like(group_M, len(group_N)).scatter_reduce_(0, group_N, torch.arange(len(group_N)), "amin")
    return first_M[group_N]


def are_alike(hashes_N2: Tensor, others_M2: Tensor) -> Tensor:
    others_MK = _signs(others_M2)
    nearest = [(_signs(rows_R2) @ others_MK.T).amax(1) for rows_R2 in hashes_N2.split(_ROWS) if len(others_M2)]
    return torch.cat(nearest) >= BITS - 2 * ALIKE if nearest else torch.zeros(len(hashes_N2), dtype=torch.bool)


def no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def no_hashes() -> Tensor:
    return torch.empty(0, 2, dtype=torch.int64)


def _text(numbers: Tensor) -> str:
    return base64.urlsafe_b64encode(numbers.numpy().astype("<i8").tobytes()).decode()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fingerprints:
    """Digests of the contents of inputs (`ids` [N]) and perceptual hashes [M,2] of the first M inputs; int64."""

    ids: Tensor = field(default_factory=no_ids)
    hashes_M2: Tensor = field(default_factory=no_hashes)

    def __post_init__(self) -> None:
        if len(self.hashes_M2) > len(self.ids):
            raise BadInput(f"fingerprints: {len(self.hashes_M2)} perceptual hashes of {len(self.ids)} inputs")

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_inputs(cls, ids: Tensor, inputs: object) -> Self:
        is_image = isinstance(inputs, Tensor) and inputs.ndim == 4 and len(ids) > 0
        return cls(ids=ids, hashes_M2=perceptual_hashes(inputs)) if is_image else cls(ids=ids)  # type: ignore[arg-type]

    @classmethod
    def concatenated(cls, parts: "Sequence[Fingerprints]") -> Self:
        ordered = sorted(parts, key=lambda part: len(part) != len(part.hashes_M2))  # parts with all hashes first
        hashes = [part.hashes_M2 for part in ordered if len(part) == len(part.hashes_M2)]
        ids = [part.ids for part in ordered]
        return cls(ids=torch.cat([no_ids(), *ids]), hashes_M2=torch.cat([no_hashes(), *hashes]))

    def select(self, places: Tensor) -> "Fingerprints":
        hashed = len(self.hashes_M2) == len(self.ids)
        return Fingerprints(ids=self.ids[places], hashes_M2=self.hashes_M2[places] if hashed else no_hashes())

    def sorted(self) -> "Fingerprints":
        return self.select(self.ids.argsort(stable=True))

    def overlap(self, others: "Fingerprints") -> tuple[int, int]:
        """Count the inputs that are among the others, and the further images that look like one of them."""
        same_N = torch.isin(self.ids, others.ids)
        unseen_K2 = self.hashes_M2[~same_N[: len(self.hashes_M2)]]
        return int(same_N.sum()), int(are_alike(unseen_K2, others.hashes_M2).sum())

    def as_json(self) -> dict[str, str]:
        return {"ids": _text(self.ids)} | ({"hashes": _text(self.hashes_M2)} if len(self.hashes_M2) else {})
