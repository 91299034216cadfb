"""A switch to one torch thread, for small operations, which several threads only slow down."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_TURNS = RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside the `with`; Python threads that enter it wait for each other."""
    with _TURNS:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
