"""Open files and running iterators of image sources, which are used again while reading goes forward."""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Held(Generic[T]):
    """The last thing that was made for a key, such as an open file; each process makes its own, and copies are empty.

    One thread uses it at a time.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._thing: T | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        if self._thing is None or self._key != (os.getpid(), key):
            self._thing = None  # closes a file before the next is opened
            self._thing, self._key = make(), (os.getpid(), key)
        return self._thing

    def drop(self) -> None:
        self._thing = None


class ForwardRows(Generic[T]):
    """An iterator whose items are asked for by number; `behind` tells whether a number was passed already."""

    def __init__(self, rows: Iterator[T]) -> None:
        self._rows = rows
        self._next = 0

    def behind(self, number: int) -> bool:
        return number < self._next

    def row(self, number: int) -> T:
        """Return an item, passing over those before it. Raises IndexError at the end of the iterator."""
        for value in islice(self._rows, number - self._next, None):
            self._next = number + 1
            return value
        raise IndexError(number)


def held_row(held: Held[ForwardRows[T]], part: int, number: int, rows: Callable[[int], Iterator[T]]) -> T:
    """Return item `number` of `rows(part)`, which is iterated again only if the item was passed already."""

    def begin() -> ForwardRows[T]:
        return ForwardRows(rows(part))

    forward = held.get(part, begin)
    if forward.behind(number):
        held.drop()
        forward = held.get(part, begin)
    try:
        return forward.row(number)
    except BaseException:
        held.drop()  # an iterator that raised has ended
        raise
