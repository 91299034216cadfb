"""The text form of fingerprints in records. Imports no torch, so that a graph's metadata can be read without it."""

import base64
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput

if TYPE_CHECKING:
    from .fingerprints import Fingerprints


def _numbers(text: str) -> NDArray[np.int64]:
    decoded: NDArray[Any] = np.frombuffer(base64.b64decode(text, altchars=b"-_", validate=True), dtype="<i8")
    return decoded.astype(np.int64)


class FingerprintsText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ids and hashes as URL-safe base64 of little-endian int64: with a slash the text could be taken for a path."""

    ids: str
    hashes: str = ""

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        try:
            return _numbers(self.ids), _numbers(self.hashes).reshape(-1, 2)
        except ValueError as error:
            raise BadInput(f"fingerprints: not base64 of 64-bit numbers ({error})") from None

    @property
    def fingerprints(self) -> "Fingerprints":
        import torch

        from .fingerprints import Fingerprints

        ids, hashes = map(torch.from_numpy, self.arrays)
        return Fingerprints(ids=ids, hashes_M2=hashes)
