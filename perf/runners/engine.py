"""Runs a serialised TensorRT or TensorRT-RTX plan on a non-default CUDA stream, with fixed addresses.

Memory, streams, events and graphs are torch.cuda's; the engine's own calls go through `EngineSession`, which is handed
the TensorRT module.
"""

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

from .cuda import Staging, captured, open_stream
from .onnx_session import role_of_rank
from .protocol import DeviceMemory, Gauge

Backend = Literal["tensorrt", "tensorrt_rtx"]


@dataclass(slots=True)
class EngineRunner:
    """A plan; it tells its inputs and outputs, but not what outputs are for: one of [B, classes] passes for logits, any
    other for a feature map. What comes out is float32.

    Args:
        path: the plan.
        backend: which of the two runtimes wrote it; a plan of one is no plan of the other.
        cuda_graph: capture the enqueued engine once per binding and replay it.
        flush_l2: overwrite the L2 cache before each call.
        precision: what its builder recorded; a plan doesn't tell.
        sha256: the digest of its bytes, without which it isn't handed to a runtime, that would run what it holds; None
            where the caller has made sure of them.
    """

    path: Path
    backend: Backend = "tensorrt"
    cuda_graph: bool = True
    flush_l2: bool = False
    precision: str = "unknown"
    sha256: str | None = None
    _trt: Any = field(default=None, init=False, repr=False)
    _session: Any = field(default=None, init=False, repr=False)
    _stream: Any = field(default=None, init=False, repr=False)

    def __enter__(self) -> Self:
        if not self.path.is_file():
            raise BadInput(f"{self.path}: no such plan")
        plan = self._plan()
        self._trt = _tensorrt(self.backend)
        require_cuda()
        self._stream = open_stream()
        eager_kernels = self.backend == "tensorrt_rtx"
        self._session = EngineSession.load(self._trt, self.path, eager_kernels=eager_kernels, plan=plan)
        return self

    def _plan(self) -> bytes:
        """The very bytes that are handed on, so that no other plan takes their place in between."""
        plan = self.path.read_bytes()
        if self.sha256 is not None and hashlib.sha256(plan).hexdigest() != self.sha256:
            raise BadInput(f"{self.path}: its bytes are not those of its record; build it again")
        return plan

    def __exit__(self, *_: object) -> None:
        self._session = None

    @property
    def inputs(self) -> tuple[Port, ...]:
        ports: tuple[Port, ...] = self._session.inputs
        return ports

    @property
    def outputs(self) -> tuple[OutputPort, ...]:
        ports: tuple[OutputPort, ...] = self._session.outputs
        return ports

    def __call__(self, feeds: Feeds) -> Outputs:
        staging, launch = self._staged(feeds)
        return staging.run(launch)

    def bind(self, feeds: Feeds) -> Bound:
        staging, launch = self._staged(feeds)
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

    def _staged(self, feeds: Feeds) -> tuple[Staging, Any]:
        """A context of its own for this batch: contexts hold shapes and addresses."""
        checked = checked_feeds(feeds, self.inputs, where=str(self.path))
        context = self._session.context({name: array.shape for name, array in checked.items()})
        names = (*(port.name for port in self.outputs), *self._session.breaks)
        shapes = {name: context.get_tensor_shape(name) for name in names}
        staging = Staging.hold(self._stream, checked, shapes, unread=self._session.breaks)
        tensors = {**staging.device_in, **staging.device_out}
        self._session.address(context, {name: tensor.data_ptr() for name, tensor in tensors.items()})
        handle, path = self._stream.cuda_stream, self.path

        def launch() -> None:
            if not context.execute_async_v3(handle):
                raise RuntimeError(f"{path}: the engine could not be enqueued")

        return staging, launch


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSession:
    """A deserialised engine, what it takes and what it gives; `breaks` are outputs that it writes and nobody reads."""

    trt: Any
    path: Path
    runtime: Any
    engine: Any
    inputs: tuple[Port, ...]
    outputs: tuple[OutputPort, ...]
    eager_kernels: bool
    log: list[str]
    breaks: tuple[str, ...] = ()

    @classmethod
    def load(cls, trt: Any, path: Path, *, eager_kernels: bool, plan: bytes | None = None) -> Self:
        """Deserialise a plan, which runs code that it may hold.

        Args:
            trt: the module tensorrt or tensorrt_rtx.
            eager_kernels: have kernels specialised for the shapes before the first call, so that no later one waits for
                it (TensorRT-RTX only).
            plan: the content of the path where it was read already.
        """
        log: list[str] = []
        runtime = trt.Runtime(_collector(trt, log))
        engine = runtime.deserialize_cuda_engine(path.read_bytes() if plan is None else plan)
        if engine is None:
            raise BadInput(
                f"{path}: {trt.__name__} {trt.__version__} cannot load this plan: (a) it was built by another version, "
                f"(b) for another GPU, (c) by the other of tensorrt and tensorrt_rtx, (d) it is damaged; "
                f"{_last_error(log)}"
            )
        inputs, every = _ports(trt, engine, path)
        return cls(
            trt=trt,
            path=path,
            runtime=runtime,
            engine=engine,
            inputs=inputs,
            outputs=tuple(port for port in every if not is_fusion_break(port.name)),
            eager_kernels=eager_kernels,
            log=log,
            breaks=tuple(port.name for port in every if is_fusion_break(port.name)),
        )

    def context(self, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """An execution context for these input shapes; raises BadInput when the plan's profile doesn't take them."""
        self._refuse_beyond_profile(shapes)
        context = self._new_context()
        if context is None:
            raise MemoryError(f"{self.path}: no memory for an execution context; {_last_error(self.log)}")
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise BadInput(
                    f"{self.path}: the engine refused the shape {list(shape)} of {name}; {_last_error(self.log)}"
                )
        return context

    def _refuse_beyond_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        beyond = []
        for name, shape in shapes.items():
            least, _, most = (tuple(limit) for limit in self.engine.get_tensor_profile_shape(name, 0))
            fits = len(shape) == len(least) and all(
                low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
            )
            if not fits:
                beyond.append(f"takes {name} from {list(least)} to {list(most)}, got {list(shape)}")
        if beyond:
            raise BadInput(f"{self.path}: {'; '.join(beyond)}; build it with a profile that includes this batch")

    def address(self, context: Any, pointers: Mapping[str, int]) -> None:
        """Fix where the context reads its inputs and writes its outputs."""
        for name, pointer in pointers.items():
            if not context.set_tensor_address(name, pointer):
                raise RuntimeError(f"{self.path}: the engine refused the address of {name}; {_last_error(self.log)}")

    def _new_context(self) -> Any:
        if not self.eager_kernels:
            return self.engine.create_execution_context()
        config = self.engine.create_runtime_config()
        config.dynamic_shapes_kernel_specialization_strategy = self.trt.DynamicShapesKernelSpecializationStrategy.EAGER
        return self.engine.create_execution_context(config)


def _ports(trt: Any, engine: Any, path: Path) -> tuple[tuple[Port, ...], tuple[OutputPort, ...]]:
    """Raises BadInput for an input of a type that nothing here feeds, and for an output that is not float32."""
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


def _collector(trt: Any, log: list[str]) -> Any:
    """A logger that keeps errors for our own message; TensorRT's own would print."""

    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                log.append(message)

    return Collector()


def _last_error(log: list[str]) -> str:
    return f"TensorRT said: {log[-1]}" if log else "TensorRT gave no reason"


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
