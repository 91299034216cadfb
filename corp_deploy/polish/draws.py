"""Which rows steps are made of, in an order that a seed decides."""

from typing import NamedTuple

import numpy as np


class Draw(NamedTuple):
    """A row, and the number of its draw among all of them."""

    row: int
    number: int


def drawn(count: int, *, first: int, size: int, seed: int) -> list[Draw]:
    """Draws `first` to `first + size` of an endless sequence; each pass over all rows has an order of its own."""
    chosen: list[Draw] = []
    while len(chosen) < size:
        epoch, start = divmod(first + len(chosen), count)
        order = np.random.default_rng((seed, epoch)).permutation(count)[start:].tolist()
        number = first + len(chosen)
        chosen += [Draw(row, number + place) for place, row in enumerate(order[: size - len(chosen)])]
    return chosen
