"""Work of thousands of tiny kernels on a GPU, captured once a shape and started as one: the host's launches are what
such work waits for.

Captured is what changes tensors in place and gives new ones. What was captured holds memory while it is `keeping`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]
Graph = tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]
"""With the tensors that it reads and changes, and those that it gives."""


@dataclass(slots=True)
class Captured:
    """`work(*tensors, count)` on a GPU by CUDA graphs, elsewhere as it is.

    Tensors are copied in front of a replay to where the graph has them, and back behind it; what is found is copied out
    before another graph is replayed, so that all of them share their memory.
    """

    work: Work
    graphs: dict[tuple[object, ...], Graph] = field(default_factory=dict)
    pool: Any = None
    depth: int = 0

    def __call__(self, *tensors: Tensor, count: int) -> tuple[Tensor, ...]:
        if not tensors[0].is_cuda:
            return self.work(*tensors, count)
        key = (tensors[0].device, count, *((each.shape, each.dtype) for each in tensors))
        if key not in self.graphs:
            self.graphs[key] = self._captured(tensors, count)
        graph, held, found = self.graphs[key]
        for there, here in zip(held, tensors, strict=True):
            there.copy_(here)
        graph.replay()
        for there, here in zip(held, tensors, strict=True):
            here.copy_(there)
        return tuple(each.clone() for each in found)

    def _captured(self, tensors: tuple[Tensor, ...], count: int) -> Graph:
        held = [each.clone() for each in tensors]
        if not self.graphs:  # what libraries set up at their first call can't be captured
            self.pool = torch.cuda.graph_pool_handle()
            aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                self.work(*held, count)
            here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            found = self.work(*held, count)
        return graph, held, found

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What is captured inside serves until the outermost of these is left, and is freed then."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.graphs.clear()
