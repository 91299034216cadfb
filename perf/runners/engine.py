"""Runner of a serialised TensorRT or TensorRT-RTX plan on a non-default CUDA stream at fixed addresses."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ground.errors import BadInput, Missing
from ground.feeds import Feeds, Outputs, checked_feeds
from ground.gpu import require_cuda
from ground.ports import OutputPort, Port, is_fusion_break
from perf.record.runs import Flat
from perf.timing.laps import Bound

from .cuda import Staging, capture_graph, open_stream
from .onnx_session import role_of_rank
from .protocol import MemoryGauge, device_gauge

Backend = Literal["tensorrt", "tensorrt_rtx"]


@dataclass(slots=True)
class EngineRunner:
    """A runner of a plan. Outputs are float32; one of shape [B, classes] counts as logits, another as a feature map.

    `precision` is that of the builder's record. `sha256` is the plan's digest, checked before the runtime loads it, or
    None if the caller has checked it.
    """

    path: Path
    backend: Backend = "tensorrt"
    cuda_graph: bool = True
    flush_l2: bool = False
    precision: str = "unknown"
    sha256: str | None = None
    inputs: tuple[Port, ...] = field(default=(), init=False)
    outputs: tuple[OutputPort, ...] = field(default=(), init=False)
    _breaks: tuple[str, ...] = field(default=(), init=False, repr=False)
    _trt: Any = field(default=None, init=False, repr=False)
    _runtime: Any = field(default=None, init=False, repr=False)
    _engine: Any = field(default=None, init=False, repr=False)
    _stream: Any = field(default=None, init=False, repr=False)
    _log: list[str] = field(default_factory=list, init=False, repr=False)

    def __enter__(self) -> Self:
        if not self.path.is_file():
            raise BadInput(f"{self.path}: no such plan")
        # The runtime gets the checked bytes, so that no other plan can replace them in between.
        plan = self.path.read_bytes()
        if self.sha256 is not None and hashlib.sha256(plan).hexdigest() != self.sha256:
            raise BadInput(f"{self.path}: its bytes are not those of its record; build it again")
        self._trt = _tensorrt(self.backend)
        require_cuda()
        self._stream = open_stream()
        self._load(plan)
        return self

    def _load(self, plan: bytes) -> None:
        """Deserialise the plan, which may run code in it."""
        trt = self._trt
        self._runtime = trt.Runtime(_error_logger(trt, self._log))
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise BadInput(
                f"{self.path}: {trt.__name__} {trt.__version__} cannot load this plan: (a) it was built by another "
                f"version, (b) for another GPU, (c) by the other of tensorrt and tensorrt_rtx, (d) it is damaged; "
                f"{self._last_error}"
            )
        self.inputs, every = _ports(trt, self._engine, self.path)
        self.outputs = tuple(port for port in every if not is_fusion_break(port.name))
        self._breaks = tuple(port.name for port in every if is_fusion_break(port.name))

    @property
    def _last_error(self) -> str:
        return f"TensorRT said: {self._log[-1]}" if self._log else "TensorRT gave no reason"

    def __exit__(self, *_: object) -> None:
        self._engine = self._runtime = None

    def __call__(self, feeds: Feeds) -> Outputs:
        staging, launch = self._staged(feeds)
        return staging.run(launch)

    def bind(self, feeds: Feeds) -> Bound:
        staging, launch = self._staged(feeds)
        ready = capture_graph(self._stream, launch) if self.cuda_graph else launch
        return staging.bound(ready, flush_l2=self.flush_l2)

    def gauge(self) -> MemoryGauge | None:
        return device_gauge()

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

    def _staged(self, feeds: Feeds) -> tuple[Staging, Any]:
        """Return the batch's memory on host and device, and a function that enqueues the engine on it once."""
        checked = checked_feeds(feeds, self.inputs, where=str(self.path))
        context = self._context({name: array.shape for name, array in checked.items()})
        names = (*(port.name for port in self.outputs), *self._breaks)
        shapes = {name: context.get_tensor_shape(name) for name in names}
        staging = Staging.hold(self._stream, checked, shapes, unread=self._breaks)
        for name, tensor in {**staging.device_in, **staging.device_out}.items():
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise RuntimeError(f"{self.path}: the engine refused the address of {name}; {self._last_error}")
        handle, path = self._stream.cuda_stream, self.path

        def launch() -> None:
            if not context.execute_async_v3(handle):
                raise RuntimeError(f"{path}: the engine could not be enqueued")

        return staging, launch

    def _context(self, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Return a context for these input shapes. Raises BadInput for shapes outside the plan's profile."""
        beyond = []
        for name, shape in shapes.items():
            least, _, most = (tuple(limit) for limit in self._engine.get_tensor_profile_shape(name, 0))
            fits = len(shape) == len(least) and all(
                low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
            )
            if not fits:
                beyond.append(f"takes {name} from {list(least)} to {list(most)}, got {list(shape)}")
        if beyond:
            raise BadInput(f"{self.path}: {'; '.join(beyond)}; build it with a profile that includes this batch")
        config: list[Any] = []
        if self.backend == "tensorrt_rtx":  # specialise kernels at the first call, not at a later one
            config = [self._engine.create_runtime_config()]
            eager = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
            config[0].dynamic_shapes_kernel_specialization_strategy = eager
        context = self._engine.create_execution_context(*config)
        if context is None:
            raise MemoryError(f"{self.path}: no memory for an execution context; {self._last_error}")
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise BadInput(f"{self.path}: the engine refused the shape {list(shape)} of {name}; {self._last_error}")
        return context


def _ports(trt: Any, engine: Any, path: Path) -> tuple[tuple[Port, ...], tuple[OutputPort, ...]]:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    sources = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    sinks = [name for name in names if name not in sources]
    supported = {trt.float32: "float32", trt.int64: "int64", trt.int32: "int32", trt.bool: "bool", trt.uint8: "uint8"}
    dtypes = {name: supported.get(engine.get_tensor_dtype(name)) for name in names}
    if not sources or not sinks or None in dtypes.values() or {dtypes[name] for name in sinks} != {"float32"}:
        received = ", ".join(f"{name}: {engine.get_tensor_dtype(name)}" for name in names)
        raise BadInput(
            f"{path}: expected inputs of {', '.join(supported.values())} and float32 outputs, found {received}; export "
            "the graph with float32 inputs and outputs"
        )
    inputs = tuple(
        Port(name=name, shape=tuple(engine.get_tensor_shape(name))[1:], dtype=str(dtypes[name])) for name in sources
    )
    roles = {name: role_of_rank(len(engine.get_tensor_shape(name))) for name in sinks}
    return inputs, tuple(OutputPort(name=name, role=role) for name, role in roles.items())


def _error_logger(trt: Any, log: list[str]) -> Any:
    """Return a logger that appends errors to `log`; TensorRT's own would print them."""

    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                log.append(message)

    return Collector()


def _tensorrt(backend: Backend) -> Any:
    try:
        if backend == "tensorrt":
            import tensorrt as library
        else:
            import tensorrt_rtx as library
    except ImportError as error:
        extra = "gpu" if backend == "tensorrt" else "rtx"
        raise Missing(f"{backend} is not installed or cannot load its libraries ({error}); extra `{extra}`") from error
    return library
