"""What tells inputs apart and finds them again: a digest of each one's content, and of images a perceptual hash."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from ground.errors import BadInput

from .perceptual import are_alike, perceptual_hashes


def no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def no_hashes() -> Tensor:
    return torch.empty(0, 2, dtype=torch.int64)


def _text(numbers: Tensor) -> str:
    return base64.urlsafe_b64encode(numbers.numpy().astype("<i8").tobytes()).decode()


def _numbers(text: str) -> Tensor:
    return torch.from_numpy(
        np.frombuffer(base64.b64decode(text, altchars=b"-_", validate=True), dtype="<i8").astype(np.int64)
    )


class FingerprintsText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of both as base64 of little-endian 64-bit integers, by the alphabet without a slash: a text with one
    passes for a path of the machine.
    """

    ids: str
    hashes: str = ""

    @property
    def fingerprints(self) -> "Fingerprints":
        """Raises BadInput for what is no such text."""
        try:
            return Fingerprints(ids=_numbers(self.ids), hashes_M2=_numbers(self.hashes).reshape(-1, 2))
        except (ValueError, RuntimeError) as error:
            raise BadInput(f"fingerprints: not base64 of 64-bit numbers ({error})") from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fingerprints:
    """`ids` [N] int64 are digests of contents; `hashes_M2` [M,2] int64 are of what the first M of them look like."""

    ids: Tensor = field(default_factory=no_ids)
    hashes_M2: Tensor = field(default_factory=no_hashes)

    def __post_init__(self) -> None:
        if len(self.hashes_M2) > len(self.ids):
            raise BadInput(f"fingerprints: {len(self.hashes_M2)} perceptual hashes of {len(self.ids)} inputs")

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, ids: Tensor, inputs: object) -> Self:
        """Of inputs with these ids: images [N,C,H,W] are looked at, others are not."""
        is_image = isinstance(inputs, Tensor) and inputs.ndim == 4 and len(ids) > 0
        return cls(ids=ids, hashes_M2=perceptual_hashes(inputs)) if is_image else cls(ids=ids)  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: "Sequence[Fingerprints]") -> Self:
        """Of all; those with hashes stand first."""
        whole = [part for part in parts if len(part) == len(part.hashes_M2)]
        every = [*whole, *(part for part in parts if len(part) != len(part.hashes_M2))]
        if not every:
            return cls()
        hashes = [part.hashes_M2 for part in whole] or [no_hashes()]
        return cls(ids=torch.cat([part.ids for part in every]), hashes_M2=torch.cat(hashes))

    def at(self, places: Tensor) -> "Fingerprints":
        """Those at these places, or where these are true; with hashes where all have one."""
        hashed = len(self.hashes_M2) == len(self.ids)
        return Fingerprints(ids=self.ids[places], hashes_M2=self.hashes_M2[places] if hashed else no_hashes())

    def sorted(self) -> "Fingerprints":
        """In the order of the ids."""
        return self.at(self.ids.argsort(stable=True))

    def seen_in(self, others: "Fingerprints") -> tuple[int, int]:
        """How many of these are among the others, and how many more look like one of them."""
        same_N = torch.isin(self.ids, others.ids)
        unseen_K2 = self.hashes_M2[~same_N[: len(self.hashes_M2)]]
        return int(same_N.sum()), int(are_alike(unseen_K2, others.hashes_M2).sum())

    def as_json(self) -> dict[str, str]:
        """As FingerprintsText has them."""
        return {"ids": _text(self.ids)} | ({"hashes": _text(self.hashes_M2)} if len(self.hashes_M2) else {})
