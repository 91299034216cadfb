"""Timing on a CUDA device, on a non-default stream at fixed addresses, with events around each stage as in trtexec.

All calls of a block are enqueued before one wait.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ground.feeds import Feeds, Outputs
from ground.gpu import require_cuda
from perf.timing.laps import Clock, Laps


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBound:
    """The stages of one call as functions that enqueue work, with events between them."""

    copy_in: Callable[[], object]
    launch: Callable[[], object]
    copy_out: Callable[[], object]
    mark: Callable[[], Any]
    wait: Callable[[], object]
    flush: Callable[[], object] | None = None

    def laps(self, calls: int, clock: Clock) -> Laps:
        started = clock()
        marks = [self._enqueue() for _ in range(calls)]
        enqueued = clock()
        self.wait()
        wall_ms = (clock() - started) / 1e6
        compute = tuple(lap[2].elapsed_time(lap[3]) for lap in marks)
        copies = (lap[0].elapsed_time(lap[1]) + lap[3].elapsed_time(lap[4]) for lap in marks)
        return Laps(
            calls=calls,
            wall_ms=wall_ms,
            compute_ms=compute,
            end_to_end_ms=tuple(ms + copy_ms for ms, copy_ms in zip(compute, copies, strict=True)),
            enqueue_ms=(enqueued - started) / 1e6,
        )

    def _enqueue(self) -> tuple[Any, ...]:
        begun = self.mark()
        self.copy_in()
        arrived = ready = self.mark()
        if self.flush is not None:
            self.flush()
            ready = self.mark()
        self.launch()
        computed = self.mark()
        self.copy_out()
        return begun, arrived, ready, computed, self.mark()


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Pinned host memory and device memory of one batch at fixed addresses; outputs are float32."""

    stream: Any
    host_in: Mapping[str, Any]
    device_in: Mapping[str, Any]
    device_out: Mapping[str, Any]
    host_out: Mapping[str, Any]

    @classmethod
    def hold(
        cls, stream: Any, feeds: Feeds, output_shapes: Mapping[str, Sequence[int]], *, unread: Sequence[str] = ()
    ) -> Self:
        import torch

        shapes = {name: tuple(shape) for name, shape in output_shapes.items()}
        with torch.cuda.stream(stream):
            host_in = {name: torch.from_numpy(array).pin_memory() for name, array in feeds.items()}
            device_in = {name: tensor.to("cuda", non_blocking=True) for name, tensor in host_in.items()}
            device_out = {
                name: torch.empty(shape, dtype=torch.float32, device="cuda") for name, shape in shapes.items()
            }
        stream.synchronize()
        read = {name: shape for name, shape in shapes.items() if name not in unread}
        host_out = {name: torch.empty(shape, dtype=torch.float32, pin_memory=True) for name, shape in read.items()}
        return cls(stream=stream, host_in=host_in, device_in=device_in, device_out=device_out, host_out=host_out)

    def bound(self, launch: Callable[[], object], *, flush_l2: bool) -> DeviceBound:
        """Return the stages around `launch`, which enqueues the model from device_in to device_out on this stream."""
        read = {name: self.device_out[name] for name in self.host_out}
        return DeviceBound(
            copy_in=self._on_stream(lambda: _copy(self.host_in, self.device_in)),
            launch=self._on_stream(launch),
            copy_out=self._on_stream(lambda: _copy(read, self.host_out)),
            mark=self._mark,
            wait=self.stream.synchronize,
            flush=self._on_stream(_l2_flush()) if flush_l2 else None,
        )

    def run(self, launch: Callable[[], object]) -> Outputs:
        bound = self.bound(launch, flush_l2=False)
        bound.copy_in()
        bound.launch()
        bound.copy_out()
        bound.wait()
        return {name: np.array(tensor.numpy(), dtype=np.float32) for name, tensor in self.host_out.items()}

    def _on_stream(self, work: Callable[[], object]) -> Callable[[], None]:
        import torch

        def enqueue() -> None:
            with torch.cuda.stream(self.stream):
                work()

        return enqueue

    def _mark(self) -> Any:
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event


def _copy(sources: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    for name, source in sources.items():
        targets[name].copy_(source, non_blocking=True)


def read_gpu_uuid() -> str:
    """Return the UUID of torch's GPU as NVML spells it. Raises Missing as `require_cuda` does."""
    import torch

    require_cuda()
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def open_stream() -> Any:
    """Return a new CUDA stream; on the default one engines synchronise with all other work."""
    import torch

    require_cuda()
    return torch.cuda.Stream()


def capture_graph(stream: Any, launch: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays `launch` as a CUDA graph, after a warm-up on the same stream."""
    import torch

    with torch.cuda.stream(stream):
        for _ in range(3):
            launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    replay: Callable[[], object] = graph.replay
    return replay


def _l2_flush() -> Callable[[], object]:
    import torch

    size = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    buffer = torch.empty(size, dtype=torch.int8, device="cuda")
    return buffer.zero_
