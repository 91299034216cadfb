"""Work on many sites side by side, a site a worker, with the threads shared out among the workers.

A site's solve is thousands of small products: threads inside them mostly wait for each other, and on a busy machine
they wait several times longer than the products take. Sites don't wait for each other.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from corp_deploy.algebra.obs import removals

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_WORKERS = 8  # each holds a handful of its site's matrices


def each(work: Callable[[Item], Result], items: Sequence[Item], device: torch.device) -> Iterator[Result]:
    """work(item) for every item, in order; on a CPU as many at a time as there are threads, up to MAX_WORKERS.

    A GPU is given one item at a time. The first error that an item raises is raised here, in its turn.
    """
    threads = torch.get_num_threads()
    workers = min(threads, MAX_WORKERS, len(items)) if device.type == "cpu" else 1
    if workers <= 1:
        with removals.keeping():
            yield from map(work, items)
        return
    no_grad, inference = not torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def alike(item: Item) -> Result:
        # Both modes belong to the thread that set them.
        with torch.inference_mode(inference), torch.set_grad_enabled(not no_grad):
            return work(item)

    torch.set_num_threads(threads // workers)
    try:
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(alike, items)
    finally:
        torch.set_num_threads(threads)
