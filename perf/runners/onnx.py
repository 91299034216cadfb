"""Runs an ONNX file in ONNX Runtime, on the CPU or through the CUDA or TensorRT execution provider."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from ground.errors import BadInput, Missing, is_out_of_memory
from perf.record.runs import Flat
from perf.timing.laps import Bound

from .cuda import Staging, open_stream
from .memory import DeviceMemory, Gauge, resident_gauge
from .protocol import HostBound, Images, Logits, as_images

Provider = Literal["cpu", "cuda", "tensorrt"]
PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
WEIGHT_PRECISION = {1: "fp32", 10: "fp16", 16: "bf16"}  # onnx.TensorProto.DataType


@dataclass(slots=True)
class OnnxRunner:
    """An ONNX model with one input of images and one output of logits.

    Args:
        path: the ONNX file; external data beside it.
        provider: `cpu`, `cuda` or `tensorrt`.
        threads: threads inside an operator; None leaves ONNX Runtime's choice (all cores).
        cuda_graph: replay a captured graph (cuda and tensorrt only).
    """

    path: Path
    provider: Provider = "cpu"
    threads: int | None = None
    cuda_graph: bool = False
    flush_l2: bool = False
    _session: Any = field(default=None, init=False, repr=False)
    _stream: Any = field(default=None, init=False, repr=False)
    _describe: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"threads: at least 1, got {self.threads}")
        if self.provider == "cpu" and (self.cuda_graph or self.flush_l2):
            raise BadInput("a CUDA graph and an L2 flush need a GPU; the provider is cpu")

    def __enter__(self) -> Self:
        ort = _onnxruntime()
        require_provider(ort.get_available_providers(), self.provider)
        if not self.path.is_file():
            raise BadInput(f"{self.path}: no such ONNX file")
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if self.provider != "cpu":
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        # Threads that spin while they wait take the CPU from the other session of a comparison: with spinning, the same
        # digits graph at batch 8 took 3.9 or 7.3 ms by turns, without it 4.1 ms always.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self.provider != "cpu":
            self._stream = open_stream()
        try:
            self._session = ort.InferenceSession(str(self.path), options, providers=self._providers())
        except _ort_errors(ort) as error:
            if is_out_of_memory(error):
                raise
            raise BadInput(f"{self.path}: ONNX Runtime cannot load it: {error}") from error
        require_granted(self._session.get_providers(), self.provider)
        self._require_signature()
        precision = onnx_precision(self.path)
        self._describe = {
            "backend": "onnxruntime",
            "version": ort.__version__,
            "device": "cpu" if self.provider == "cpu" else "cuda",
            "provider": PROVIDERS[self.provider],
            "precision": precision,
            "computed_in": "fp32" if self.provider == "cpu" else precision,
            "mode": "session",
            "cuda_graph": self.cuda_graph,
            "flush_l2": self.flush_l2,
            "threads": self.threads,
            "spinning": False,
            "clock": "host" if self.provider == "cpu" else "cuda events",
            "model": self.path.name,
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._session = None

    def __call__(self, images: Images) -> Logits:
        if self.provider != "cpu":
            return self._call_cuda(as_images(images))
        feeds = {self._input.name: self._fitting(images)}
        try:
            logits = self._session.run(None, feeds)[0]
        except _ort_errors(_onnxruntime()) as error:
            if is_out_of_memory(error):
                raise
            sizes = list(feeds[self._input.name].shape)
            raise BadInput(
                f"{self.path}: ONNX Runtime cannot run it on {self._input.name} {sizes}, which it says it takes; "
                f"export it again ({error!s:.300})"
            ) from error
        return np.asarray(logits, dtype=np.float32)

    def bind(self, images: Images) -> Bound:
        if self.provider != "cpu":
            return self._bind_cuda(as_images(images))
        run, feeds = self._session.run, {self._input.name: self._fitting(images)}
        return HostBound(lambda: run(None, feeds))

    def gauge(self) -> Gauge | None:
        return resident_gauge() if self.provider == "cpu" else DeviceMemory()

    def describe(self) -> Flat:
        return dict(self._describe)

    def _fitting(self, images: Images) -> Images:
        """The images, if they have the sizes that the graph fixes."""
        given, sizes = as_images(images), self._input.shape
        if len(sizes) != given.ndim or any(
            isinstance(size, int) and size != own for size, own in zip(sizes, given.shape, strict=True)
        ):
            raise BadInput(f"{self.path}: takes {self._input.name} {list(sizes)}, got {list(given.shape)}")
        return given

    @property
    def _input(self) -> Any:
        return self._session.get_inputs()[0]

    def _require_signature(self) -> None:
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1 or inputs[0].type != "tensor(float)":
            found = ", ".join(f"{node.name}: {node.type}" for node in (*inputs, *outputs))
            raise BadInput(f"{self.path}: expected one float32 input and one output, found {found}")

    def _providers(self) -> list[tuple[str, dict[str, str]]]:
        if self.provider == "cpu":
            return [(PROVIDERS["cpu"], {})]
        options = {"device_id": "0", "user_compute_stream": str(self._stream.cuda_stream)}
        if self.provider == "tensorrt":
            return [(PROVIDERS["tensorrt"], {**options, "trt_cuda_graph_enable": str(int(self.cuda_graph))})]
        return [(PROVIDERS["cuda"], {**options, "enable_cuda_graph": str(int(self.cuda_graph))})]

    def _call_cuda(self, images: Images) -> Logits:
        staging, launch = self._staged(images)
        bound = staging.bound(launch, flush_l2=False)
        bound.copy_in()
        bound.launch()
        bound.copy_out()
        bound.wait()
        return np.array(staging.host_out.numpy(), dtype=np.float32)

    def _bind_cuda(self, images: Images) -> Bound:
        """The first runs happen here: kernels are chosen in them, and a graph is captured."""
        staging, launch = self._staged(images)
        for _ in range(3):
            launch()
        self._stream.synchronize()
        return staging.bound(launch, flush_l2=self.flush_l2)

    def _staged(self, images: Images) -> tuple[Staging, Callable[[], None]]:
        """Fixed device addresses bound to the session, which enqueues on its own stream without waiting."""
        import onnxruntime as ort

        staging = Staging.hold(self._stream, images, (len(images), self._classes()))
        binding = self._session.io_binding()
        for bind, name, tensor in (
            (binding.bind_input, self._input.name, staging.device_in),
            (binding.bind_output, self._output.name, staging.device_out),
        ):
            bind(name, "cuda", 0, np.float32, tuple(tensor.shape), tensor.data_ptr())
        options = ort.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        session = self._session

        def launch() -> None:
            session.run_with_iobinding(binding, options)

        return staging, launch

    def _classes(self) -> int:
        shape = self._output.shape
        if len(shape) != 2 or not isinstance(shape[1], int):
            raise BadInput(
                f"{self.path}: the output must be [batch, classes] with a fixed number of classes, got {shape}"
            )
        return shape[1]

    @property
    def _output(self) -> Any:
        return self._session.get_outputs()[0]


def require_provider(available: list[str], provider: Provider) -> None:
    """Raise Missing unless this build of ONNX Runtime has the provider."""
    wanted = PROVIDERS[provider]
    if wanted not in available:
        raise Missing(
            f"ONNX Runtime here has no {wanted}, only {', '.join(available)}: (a) install onnxruntime-gpu instead of "
            f"onnxruntime, (b) check the CUDA libraries, (c) measure with provider cpu"
        )


def require_granted(granted: list[str], provider: Provider) -> None:
    """Raise Missing when the session was given another provider than the one asked for."""
    if PROVIDERS[provider] not in granted:
        raise Missing(
            f"asked ONNX Runtime for {PROVIDERS[provider]} and got {', '.join(granted)}: its libraries failed to load; "
            f"check the driver and the CUDA, cuDNN and TensorRT versions that this onnxruntime-gpu was built for"
        )


def onnx_precision(path: Path) -> str:
    """The type of the weights by bytes: fp32, fp16, bf16, or mixed when none holds 99 %."""
    import onnx

    sizes: Counter[str] = Counter()
    for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
        if tensor.data_type in WEIGHT_PRECISION:
            width = 4 if tensor.data_type == onnx.TensorProto.FLOAT else 2
            sizes[WEIGHT_PRECISION[tensor.data_type]] += width * int(np.prod(tensor.dims, dtype=np.int64))
    if not sizes:
        return "unknown"
    name, size = sizes.most_common(1)[0]
    return name if size >= 0.99 * sizes.total() else "mixed"


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise Missing("onnxruntime is not installed; install the extra `cpu` or `gpu`") from error
    return onnxruntime


def _ort_errors(ort: Any) -> tuple[type[Exception], ...]:
    state = ort.capi.onnxruntime_pybind11_state
    return (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NotImplemented,
        state.RuntimeException,
    )
