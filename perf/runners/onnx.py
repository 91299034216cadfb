"""Runner of an ONNX file in ONNX Runtime, on the CPU or by the CUDA or TensorRT execution provider."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from ground.errors import BadInput, is_out_of_memory
from ground.feeds import Feeds, Outputs, batch_size, checked_feeds
from ground.onnx_file import read_onnx
from ground.ports import OutputPort, Port
from ground.precision import (
    BFLOAT16,
    BY_ONNX,
    FLOAT8,
    FLOAT32,
    HALVES,
    QUANTISED,
    FloatType,
    mixed_with_float32,
    type_by_name,
)
from perf.record.runs import Flat
from perf.timing.laps import Bound

from .cuda import Staging, open_stream
from .onnx_session import (
    OUTPUTS_NOTE,
    PROVIDERS,
    Provider,
    build_ports,
    import_onnxruntime,
    open_session,
    ort_errors,
    require_provider,
    session_options,
)
from .protocol import HostBound, MemoryGauge, device_gauge, resident_gauge


@dataclass(slots=True)
class OnnxRunner:
    """A runner of an ONNX file with the file's inputs and outputs, except fusion breaks.

    An output without a role in the file's note counts as logits if its shape is [B, classes], else as a feature map.
    `fixed_batch` is the graph's batch size, None if free. `threads` is None for ONNX Runtime's choice. `as_typed`
    computes Q/DQ pairs in float32, on the CPU.
    """

    path: Path
    provider: Provider = "cpu"
    threads: int | None = None
    cuda_graph: bool = False
    flush_l2: bool = False
    as_typed: bool = False
    inputs: tuple[Port, ...] = field(default=(), init=False)
    outputs: tuple[OutputPort, ...] = field(default=(), init=False)
    fixed_batch: int | None = field(default=None, init=False)
    _session: Any = field(default=None, init=False, repr=False)
    _stream: Any = field(default=None, init=False, repr=False)
    _describe: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"threads: at least 1, got {self.threads}")
        if self.provider == "cpu" and (self.cuda_graph or self.flush_l2):
            raise BadInput("a CUDA graph and an L2 flush need a GPU; the provider is cpu")

    def __enter__(self) -> Self:
        assert not self.as_typed or self.provider == "cpu", self.provider
        ort = import_onnxruntime()
        require_provider(ort.get_available_providers(), self.provider)
        precision = onnx_precision(self.path)
        if self.provider == "cpu":
            float_type = type_by_name(precision)
            if float_type in (BFLOAT16, FLOAT8):
                raise BadInput(
                    f"{self.path}: a {float_type.label} graph, and ONNX Runtime's CPU kernels have no arithmetic in "
                    f"{float_type.name}: (a) run an engine of it or provider cuda, (b) time the fp32 graph; "
                    "verify needs neither, because it emulates the type's rounding"
                )
        options, own = session_options(self.threads), dict[str, str]()
        if self.provider != "cpu":
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            self._stream = open_stream()
            captures = "trt_cuda_graph_enable" if self.provider == "tensorrt" else "enable_cuda_graph"
            own = {"device_id": "0", "user_compute_stream": str(self._stream.cuda_stream)}
            own[captures] = str(int(self.cuda_graph))
        if self.as_typed:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._session = open_session(self.path, self.provider, options, own)
        self._set_ports()
        self._describe = {
            "backend": "onnxruntime",
            "version": ort.__version__,
            "device": "cpu" if self.provider == "cpu" else "cuda",
            "provider": PROVIDERS[self.provider],
            "precision": precision,
            "computed_in": "fp32" if self.as_typed or (self.provider == "cpu" and precision != "int8") else precision,
            "mode": "session",
            "cuda_graph": self.cuda_graph,
            "flush_l2": self.flush_l2,
            "threads": options.intra_op_num_threads or None,
            "spinning": False,
            "clock": "host" if self.provider == "cpu" else "cuda events",
            "model": self.path.name,
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None

    def __call__(self, feeds: Feeds) -> Outputs:
        checked = self._checked(feeds)
        if self.provider != "cpu":
            staging, launch = self._staged(checked)
            return staging.run(launch)
        try:
            return self._outputs_by_name(self._session.run(self._output_names, dict(checked)))
        except ort_errors(import_onnxruntime()) as error:
            if is_out_of_memory(error):
                raise
            fed = ", ".join(f"{name} {list(array.shape)}" for name, array in checked.items())
            raise BadInput(
                f"{self.path}: ONNX Runtime cannot run it on {fed}, although the graph declares these inputs; "
                f"export it again ({error!s:.300})"
            ) from error

    def bind(self, feeds: Feeds) -> Bound:
        checked = dict(self._checked(feeds))
        if self.provider != "cpu":
            staging, launch = self._staged(checked)
            for _ in range(3):  # the first runs choose kernels and capture a graph
                launch()
            self._stream.synchronize()
            return staging.bound(launch, flush_l2=self.flush_l2)
        run, output_names = self._session.run, self._output_names
        return HostBound(lambda: run(output_names, checked), outputs=self._outputs_by_name)

    def gauge(self) -> MemoryGauge | None:
        return resident_gauge() if self.provider == "cpu" else device_gauge()

    def describe(self) -> Flat:
        return dict(self._describe)

    def _checked(self, feeds: Feeds) -> Feeds:
        return checked_feeds(feeds, self.inputs, where=str(self.path), batch=self.fixed_batch)

    @property
    def _output_names(self) -> list[str]:
        return [port.name for port in self.outputs]

    def _outputs_by_name(self, arrays: Sequence[Any]) -> Outputs:
        return {
            port.name: np.asarray(array, dtype=np.float32) for port, array in zip(self.outputs, arrays, strict=True)
        }

    def _set_ports(self) -> None:
        inputs, outputs = (
            [(node.name, _numpy_dtype(node.type), _sizes(node.shape)) for node in nodes]
            for nodes in (self._session.get_inputs(), self._session.get_outputs())
        )
        note = self._session.get_modelmeta().custom_metadata_map.get(OUTPUTS_NOTE, "[]")
        self.inputs, self.outputs, self.fixed_batch = build_ports(self.path, inputs, outputs, note)

    def _staged(self, feeds: Feeds) -> tuple[Staging, Callable[[], None]]:
        """Return memory bound to the session, and a function that enqueues a run without waiting for it."""
        import onnxruntime as ort

        staging = Staging.hold(self._stream, feeds, self._output_shapes(batch_size(feeds)))
        binding = self._session.io_binding()
        for name, tensor in staging.device_in.items():
            binding.bind_input(name, "cuda", 0, feeds[name].dtype.type, tuple(tensor.shape), tensor.data_ptr())
        for name, tensor in staging.device_out.items():
            binding.bind_output(name, "cuda", 0, np.float32, tuple(tensor.shape), tensor.data_ptr())
        options = ort.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        session = self._session

        def launch() -> None:
            session.run_with_iobinding(binding, options)

        return staging, launch

    def _output_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        nodes = {node.name: node for node in self._session.get_outputs()}
        shapes = {name: tuple(nodes[name].shape) for name in self._output_names}
        for name, shape in shapes.items():
            if len(shape) < 2 or not all(isinstance(size, int) for size in shape[1:]):
                raise BadInput(
                    f"{self.path}: the output {name} must be [batch, ...] with fixed sizes behind the batch, "
                    f"got {list(shape)}"
                )
        return {name: (batch, *shape[1:]) for name, shape in shapes.items()}


def _numpy_dtype(kind: str) -> str:
    """Return numpy's name of an ONNX Runtime tensor type; other types, such as `seq(tensor(float))`, unchanged."""
    name = kind.removeprefix("tensor(").removesuffix(")") if kind.startswith("tensor(") else kind
    return {"float": "float32", "double": "float64"}.get(name, name)


def _sizes(shape: Sequence[int | str | None]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in shape)


def onnx_precision(path: Path) -> str:
    """Return the precision of a graph's weights by their bytes, `unknown` without weights.

    A quantised type with more than 1 % of the bytes gives its name; otherwise it is mixed if no type has 99 %.
    """
    sizes: Counter[FloatType] = Counter()
    for tensor in read_onnx(path, weights=False).graph.initializer:
        float_type = BY_ONNX.get(tensor.data_type)
        if float_type is not None:
            sizes[float_type] += float_type.size_bytes * int(np.prod(tensor.dims, dtype=np.int64))
    if not sizes:
        return "unknown"
    quantised = [word for word, each in QUANTISED.items() if sizes[each] > 0.01 * sizes.total()]
    if quantised:
        return quantised[0]
    most, size = sizes.most_common(1)[0]
    if size >= 0.99 * sizes.total():
        return "fp32" if most is FLOAT32 else mixed_with_float32(most).pure
    return mixed_with_float32(max(HALVES, key=lambda each: sizes[each])).name
