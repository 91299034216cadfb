"""Random choice of inputs by a seed, and a digest of inputs' names and contents. Imports no torch."""

import hashlib
from collections.abc import Iterable

import numpy as np

from ground.errors import BadInput


def drawn_places(available: int, samples: int | None, seed: int, *, noun: str, where: object) -> tuple[int, ...]:
    """Return `samples` of the indices below `available`, drawn by `seed`, ascending; all of them for None.

    Raises BadInput unless `samples` is between 1 and the available number.
    """
    if samples is None:
        return tuple(range(available))
    if samples not in range(1, available + 1):
        raise BadInput(
            f"{where}: got {available} {noun}, but {samples} samples were asked for; ask for 1 to {available} or all"
        )
    return tuple(sorted(np.random.default_rng(seed).choice(available, samples, replace=False).tolist()))


def digest_of_contents(named: Iterable[tuple[str, bytes]]) -> str:
    """Return one hexadecimal SHA-256 over the name and content digest of each input, in order."""
    digest = hashlib.sha256()
    for name, content in named:
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()
