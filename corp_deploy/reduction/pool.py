"""Work on many sites in parallel, one site per worker, with the threads shared among the workers.

A site's solve is thousands of small products: threads inside them mostly wait for each other, and on a busy machine
they wait several times longer than the products take. Sites don't wait for each other.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

import torch

from corp_deploy.algebra.obs import removals

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_WORKERS = 8  # each holds a handful of its site's matrices


class _Map(Protocol):
    """The built-in `map`, with the calls made by several workers."""

    def __call__(self, work: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]: ...


def _call_in_modes(work: Callable[[Item], Result], grad: bool, inference: bool, item: Item) -> Result:
    # Both modes are set per thread, so each worker sets those of the caller.
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        return work(item)


@contextmanager
def mapping(count: int, device: torch.device) -> Iterator[_Map]:
    """Open a `map` over `count` items, in order; on a CPU one worker per thread, up to MAX_WORKERS.

    A GPU gets one item at a time. An item's error is raised when the iteration reaches its result.
    """
    threads = torch.get_num_threads()
    workers = min(threads, MAX_WORKERS, count) if device.type == "cpu" else 1
    if workers <= 1:
        with removals.keeping():
            yield map
        return
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    torch.set_num_threads(threads // workers)
    try:
        with ThreadPoolExecutor(workers) as pool:
            yield lambda work, items: pool.map(partial(_call_in_modes, work, grad, inference), items)
    finally:
        torch.set_num_threads(threads)
