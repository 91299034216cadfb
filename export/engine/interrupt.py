"""Ctrl-C while a C++ library works: taken by a waiting thread, since the library swallows what its callbacks raise."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def interruptible(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Runs `work` in a thread of its own. Ctrl-C calls `stop`, after which `work` is to end by KeyboardInterrupt.

    Python delivers signals to the main thread only, so callbacks that run in the worker are never broken into.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(work)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done():
                    raise
                stop()
