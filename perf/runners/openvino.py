"""Runner of an ONNX file in OpenVINO on the CPU.

OpenVINO's default precision depends on the CPU, and its hint reports f32 for BF16 layers. Therefore the precision is
always set, and recorded from the matrix products of the compiled model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from ground.errors import BadInput, Missing, is_out_of_memory
from ground.feeds import Feeds, Outputs, checked_feeds
from ground.onnx_file import checker_error
from ground.ports import OutputPort, Port
from ground.threads import thread_limit
from perf.record.runs import Flat
from perf.timing.laps import Bound

from .onnx import onnx_precision
from .onnx_session import read_onnx_ports
from .protocol import HostBound, MemoryGauge, resident_gauge

Arithmetic = Literal["fp32", "fp16", "bf16"]
HINTS: dict[Arithmetic, str] = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
WORDS = {**{name: word for word, name in HINTS.items()}, "i8": "int8", "u8": "int8"}
# Prefixes of the types of compiled layers that are matrix products.
PRODUCTS = ("Convolution", "Deconvolution", "FullyConnected", "Gemm", "LLMMLP", "MatMul", "QKVProj", "ScaledDot")
REMEDY = "pip install 'corp-deploy[openvino]'"


@dataclass(slots=True)
class OpenVinoRunner:
    """A runner of an ONNX file in OpenVINO, with ports as in OnnxRunner.

    `arithmetic` is the type to compute in, None for the graph's own types with FP16 in float32. `threads` is None for
    OpenVINO's choice.
    """

    path: Path
    arithmetic: Arithmetic | None = None
    threads: int | None = None
    inputs: tuple[Port, ...] = field(default=(), init=False)
    outputs: tuple[OutputPort, ...] = field(default=(), init=False)
    fixed_batch: int | None = field(default=None, init=False)
    _compiled: Any = field(default=None, init=False, repr=False)
    _describe: Flat = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"threads: at least 1, got {self.threads}")

    def __enter__(self) -> Self:
        openvino, core = import_openvino(), shared_core()
        self.inputs, self.outputs, self.fixed_batch = read_onnx_ports(self.path)
        if reason := checker_error(self.path):  # OpenVINO may crash on an invalid graph
            raise BadInput(f"{self.path}: OpenVINO cannot load it: not valid: {reason}; export it again")
        threads = thread_limit() if self.threads is None else self.threads
        options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": HINTS[self.arithmetic or "fp32"],
            "EXECUTION_MODE_HINT": "ACCURACY",
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,  # the caller has its own streams
            "ENABLE_CPU_PINNING": False,  # both models of a comparison use the same cores
            **({} if threads is None else {"INFERENCE_NUM_THREADS": threads}),
        }
        self._compiled = self._or_bad_input(lambda: core.compile_model(str(self.path), "CPU", options), "load it")
        settings, precision = CompiledSettings.of_model(self._compiled), onnx_precision(self.path)
        settings.require("fp32" if self.arithmetic is None and precision == "fp32" else self.arithmetic, threads)
        self._describe = {
            "backend": "openvino",
            "version": openvino.__version__,
            "device": "cpu",
            "precision": precision,
            "computed_in": "+".join(settings.products),
            "inference_precision": settings.hint,
            "execution_mode": settings.execution_mode,
            "mode": "session",
            "cuda_graph": False,
            "flush_l2": False,
            "threads": settings.threads,
            "openvino_streams": settings.streams,
            "pinning": settings.pinning,
            "clock": "host",
            "model": self.path.name,
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._compiled = None

    def __call__(self, feeds: Feeds) -> Outputs:
        request, _ = self._request(feeds)
        self._or_bad_input(request.infer, "run it")
        return self._outputs_of(request)

    def bind(self, feeds: Feeds) -> Bound:
        request, tensors = self._request(feeds)

        def answers(_: object) -> Outputs:
            assert tensors  # the request reads them in place, so this closure keeps them alive
            return self._outputs_of(request)

        return HostBound(request.infer, outputs=answers)

    def gauge(self) -> MemoryGauge | None:
        return resident_gauge()

    def describe(self) -> Flat:
        return dict(self._describe)

    def _request(self, feeds: Feeds) -> tuple[Any, list[Any]]:
        """Return a request and the tensors that it reads in place, which must outlive the request."""
        checked = checked_feeds(feeds, self.inputs, where=str(self.path), batch=self.fixed_batch)
        read = {name for port in self._compiled.inputs for name in port.names}
        openvino, request = import_openvino(), self._compiled.create_infer_request()
        tensors = []
        for name, array in checked.items():
            if name in read:
                tensors.append(openvino.Tensor(np.ascontiguousarray(array), shared_memory=True))
                request.set_tensor(name, tensors[-1])
        return request, tensors

    def _outputs_of(self, request: Any) -> Outputs:
        return {port.name: np.array(request.get_tensor(port.name).data, dtype=np.float32) for port in self.outputs}

    def _or_bad_input(self, work: Callable[[], Any], step: str) -> Any:
        try:
            return work()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[-300:]
            raise BadInput(f"{self.path}: OpenVINO cannot {step}: {reason}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSettings:
    """Settings that a compiled model reports; `products` has the types of its matrix products."""

    products: tuple[str, ...]
    hint: str
    execution_mode: str
    threads: int
    streams: int
    pinning: bool

    @classmethod
    def of_model(cls, compiled: Any) -> Self:
        hint = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        layers = [layer.get_rt_info() for layer in compiled.get_runtime_model().get_ordered_ops()]
        types = {
            layer["runtimePrecision"].astype(str)
            for layer in layers
            if layer["layerType"].astype(str).startswith(PRODUCTS)
        }
        return cls(
            products=tuple(sorted({WORDS.get(each, each) for each in types})),
            hint=WORDS.get(hint, hint),
            execution_mode=str(compiled.get_property("EXECUTION_MODE_HINT")).rpartition(".")[2],
            threads=int(compiled.get_property("INFERENCE_NUM_THREADS")),
            streams=int(compiled.get_property("NUM_STREAMS")),
            pinning=bool(compiled.get_property("ENABLE_CPU_PINNING")),
        )

    def require(self, arithmetic: Arithmetic | None, threads: int | None) -> None:
        """Raise Missing if the model runs in another way than requested; OpenVINO takes the nearest that it has."""
        if arithmetic is not None and self.hint != arithmetic:
            raise Missing(
                f"asked OpenVINO for {arithmetic} and got {self.hint}, the nearest that this CPU has: ask for that or "
                f"for fp32, or run it on a CPU with instructions for {arithmetic}"
            )
        # No product may have fewer bits than requested; some may have more.
        if arithmetic is not None and {"fp16", "bf16"} & set(self.products) != {arithmetic} - {"fp32"}:
            raise Missing(
                f"asked OpenVINO for {arithmetic}, and it computes products in {' and '.join(self.products)}, as the "
                f"graph is typed: export the graph in fp32, or leave out {arithmetic} to run it in the graph's types"
            )
        if threads is not None and self.threads != threads:
            raise Missing(
                f"asked OpenVINO for {threads} threads and got {self.threads}: it takes no more than the cores that "
                f"this process may use; ask for {self.threads} or fewer"
            )
        if self.execution_mode != "ACCURACY":
            raise Missing(f"asked OpenVINO for execution mode ACCURACY and got {self.execution_mode}")


def import_openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise Missing(f"openvino is not installed; {REMEDY}") from error
    return openvino


@cache
def shared_core() -> Any:
    """Return the process's only core, which is never freed.

    A freed core restores the signal stack that it found. With two cores that stack may be freed memory, and the next
    signal crashes the process. Raises Missing without OpenVINO.
    """
    return import_openvino().Core()
