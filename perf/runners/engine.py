"""Runs a serialised TensorRT or TensorRT-RTX plan on a non-default CUDA stream, with fixed addresses.

Memory, streams, events and graphs are torch.cuda's; the engine's own calls go through `EngineSession`, which is handed
the TensorRT module.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from ground.errors import BadInput, Missing
from ground.gpu import require_cuda
from perf.record.runs import Flat
from perf.timing.laps import Bound

from .cuda import Staging, captured, open_stream
from .memory import DeviceMemory, Gauge
from .protocol import Images, Logits, as_images

Backend = Literal["tensorrt", "tensorrt_rtx"]


@dataclass(slots=True)
class EngineRunner:
    """A plan with one float32 input of images and one float32 output of logits.

    Args:
        path: the plan.
        backend: which of the two runtimes wrote it; a plan of one is no plan of the other.
        cuda_graph: capture the enqueued engine once per binding and replay it.
        flush_l2: overwrite the L2 cache before each call.
        precision: what its builder recorded; a plan doesn't tell.
    """

    path: Path
    backend: Backend = "tensorrt"
    cuda_graph: bool = True
    flush_l2: bool = False
    precision: str = "unknown"
    _trt: Any = field(default=None, init=False, repr=False)
    _session: Any = field(default=None, init=False, repr=False)
    _stream: Any = field(default=None, init=False, repr=False)

    def __enter__(self) -> Self:
        if not self.path.is_file():
            raise BadInput(f"{self.path}: no such plan")
        self._trt = _tensorrt(self.backend)
        require_cuda()
        self._stream = open_stream()
        self._session = EngineSession.load(self._trt, self.path, eager_kernels=self.backend == "tensorrt_rtx")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._session = None

    def __call__(self, images: Images) -> Logits:
        staging, launch = self._staged(as_images(images))
        bound = staging.bound(launch, flush_l2=False)
        bound.copy_in()
        bound.launch()
        bound.copy_out()
        bound.wait()
        return np.array(staging.host_out.numpy(), dtype=np.float32)

    def bind(self, images: Images) -> Bound:
        staging, launch = self._staged(as_images(images))
        ready = captured(self._stream, launch) if self.cuda_graph else launch
        return staging.bound(ready, flush_l2=self.flush_l2)

    def gauge(self) -> Gauge | None:
        return DeviceMemory()

    def describe(self) -> Flat:
        return {
            "backend": self.backend,
            "version": self._trt.__version__,
            "device": "cuda",
            "precision": self.precision,
            "mode": "engine",
            "cuda_graph": self.cuda_graph,
            "flush_l2": self.flush_l2,
            "threads": None,
            "clock": "cuda events",
            "model": self.path.name,
        }

    def _staged(self, images: Images) -> tuple[Staging, Any]:
        """A context of its own for this batch: contexts hold shapes and addresses."""
        context = self._session.context(images.shape)
        staging = Staging.hold(self._stream, images, context.get_tensor_shape(self._session.output))
        self._session.address(context, staging.device_in.data_ptr(), staging.device_out.data_ptr())
        handle, path = self._stream.cuda_stream, self.path

        def launch() -> None:
            if not context.execute_async_v3(handle):
                raise RuntimeError(f"{path}: the engine could not be enqueued")

        return staging, launch


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSession:
    """A deserialised engine and the names of its two tensors."""

    trt: Any
    path: Path
    runtime: Any
    engine: Any
    input: str
    output: str
    eager_kernels: bool
    log: list[str]

    @classmethod
    def load(cls, trt: Any, path: Path, *, eager_kernels: bool) -> Self:
        """Deserialise a plan.

        Args:
            trt: the module tensorrt or tensorrt_rtx.
            eager_kernels: have kernels specialised for the shapes before the first call, so that no later one waits for
                it (TensorRT-RTX only).
        """
        log: list[str] = []
        runtime = trt.Runtime(_collector(trt, log))
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise BadInput(
                f"{path}: {trt.__name__} {trt.__version__} cannot load this plan: (a) it was built by another version, "
                f"(b) for another GPU, (c) by the other of tensorrt and tensorrt_rtx, (d) it is damaged; {_said(log)}"
            )
        source, sink = _ends(trt, engine, path)
        return cls(
            trt=trt,
            path=path,
            runtime=runtime,
            engine=engine,
            input=source,
            output=sink,
            eager_kernels=eager_kernels,
            log=log,
        )

    def context(self, shape: tuple[int, ...]) -> Any:
        """An execution context for one input shape; raises BadInput when the plan's profile doesn't take it."""
        least, _, most = (tuple(limit) for limit in self.engine.get_tensor_profile_shape(self.input, 0))
        fits = len(shape) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
        )
        if not fits:
            raise BadInput(
                f"{self.path}: takes {self.input} from {list(least)} to {list(most)}, got {list(shape)}; "
                f"build it with a profile that includes this batch"
            )
        context = self._new_context()
        if context is None:
            raise MemoryError(f"{self.path}: no memory for an execution context; {_said(self.log)}")
        if not context.set_input_shape(self.input, shape):
            raise BadInput(f"{self.path}: the engine refused the shape {list(shape)}; {_said(self.log)}")
        return context

    def address(self, context: Any, source: int, sink: int) -> None:
        """Fix where the context reads images and writes logits."""
        for name, pointer in ((self.input, source), (self.output, sink)):
            if not context.set_tensor_address(name, pointer):
                raise RuntimeError(f"{self.path}: the engine refused the address of {name}; {_said(self.log)}")

    def _new_context(self) -> Any:
        if not self.eager_kernels:
            return self.engine.create_execution_context()
        config = self.engine.create_runtime_config()
        config.dynamic_shapes_kernel_specialization_strategy = self.trt.DynamicShapesKernelSpecializationStrategy.EAGER
        return self.engine.create_execution_context(config)


def _ends(trt: Any, engine: Any, path: Path) -> tuple[str, str]:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    sources = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    sinks = [name for name in names if name not in sources]
    single = len(sources) == 1 and len(sinks) == 1
    if not single or any(engine.get_tensor_dtype(name) != trt.float32 for name in names):
        found = ", ".join(f"{name}: {engine.get_tensor_dtype(name)}" for name in names)
        raise BadInput(f"{path}: expected one float32 input and one float32 output, found {found}")
    return sources[0], sinks[0]


def _collector(trt: Any, log: list[str]) -> Any:
    """A logger that keeps errors for our own message; TensorRT's own would print."""

    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                log.append(message)

    return Collector()


def _said(log: list[str]) -> str:
    return f"TensorRT said: {log[-1]}" if log else "TensorRT gave no reason"


def _tensorrt(backend: Backend) -> Any:
    try:
        if backend == "tensorrt":
            import tensorrt

            return tensorrt
        import tensorrt_rtx

        return tensorrt_rtx
    except ImportError as error:
        extra = "gpu" if backend == "tensorrt" else "rtx"
        raise Missing(f"{backend} is not installed or cannot load its libraries ({error}); extra `{extra}`") from error
