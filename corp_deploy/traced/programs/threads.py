"""A switch to one torch thread, for work whose threads cost more than they save."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_TURNS = RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run many small operations in one thread, which is faster on a busy machine; callers take turns."""
    with _TURNS:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
