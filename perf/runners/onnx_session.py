"""Sessions of ONNX Runtime with exactly the requested execution provider, and the ports of ONNX files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ground.errors import BadInput, Missing, is_out_of_memory
from ground.onnx_file import read_onnx
from ground.onnx_types import dtype_of
from ground.ports import OutputPort, Port, Role, is_fusion_break
from ground.records import record_from_text
from ground.threads import thread_limit

# Metadata of a graph with the roles of its outputs: a JSON list of objects with name and role.
OUTPUTS_NOTE = "export.outputs"
AGAIN = "export it again"
# Element types of inputs that runners feed, and of outputs that they read.
FED = ("float32", "int64", "int32", "bool", "uint8")
READ = (*FED, "float16", "float64", "int8", "int16", "uint16", "uint32", "uint64")


Value = tuple[str, str, tuple[int, ...]]
"""A name, numpy's name of its type, and sizes with the batch in front, -1 for free ones."""
Borders = tuple[tuple[Port, ...], tuple[OutputPort, ...], int | None]
"""Inputs and outputs in order, and the batch size that the graph fixes, None if free."""


def read_onnx_ports(path: Path) -> Borders:
    """Return the ports of an ONNX file. Raises BadInput for an invalid file and for unsupported element types."""
    proto = read_onnx(path, weights=False)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    inputs, outputs = (
        [(value.name, dtype_of(value), _sizes(value)) for value in values]
        for values in (proto.graph.input, proto.graph.output)
    )
    note = next((entry.value for entry in proto.metadata_props if entry.key == OUTPUTS_NOTE), "[]")
    return build_ports(path, [each for each in inputs if each[0] not in initializers], outputs, note)


def build_ports(path: Path, inputs: Sequence[Value], outputs: Sequence[Value], note: str) -> Borders:
    """Return ports with roles from the note on outputs. Raises BadInput as `read_onnx_ports` does."""
    answers = [(name, dtype, sizes) for name, dtype, sizes in outputs if not is_fusion_break(name)]
    if not answers or not all(dtype in READ for _, dtype, _ in answers):
        received = ", ".join(f"{name}: {dtype}" for name, dtype, _ in answers)
        raise BadInput(f"{path}: expected outputs that are tensors of {', '.join(READ)}; found {received or 'none'}")
    if not inputs or not all(dtype in FED and sizes for _, dtype, sizes in inputs):
        received = ", ".join(f"{name}: {dtype} {list(sizes)}" for name, dtype, sizes in inputs)
        expected = f"expected inputs with a batch in front, of {', '.join(FED)}"
        raise BadInput(f"{path}: {expected}; found {received or 'none'}")
    where = f"{path}: its note {OUTPUTS_NOTE} can't be read"
    ports = record_from_text(note, list[OutputPort], where=where, remedy=AGAIN)
    roles = {port.name: port.role for port in ports}
    batch = min((sizes[0] for _, _, sizes in inputs if sizes[0] >= 0), default=None)
    return (
        tuple(Port(name=name, shape=sizes[1:], dtype=dtype) for name, dtype, sizes in inputs),
        tuple(OutputPort(name=name, role=roles.get(name, role_of_rank(len(sizes)))) for name, _, sizes in answers),
        batch,
    )


def role_of_rank(rank: int) -> Role:
    """Return the role of an output without a noted one: logits for rank 1 or 2, else feature map."""
    return "logits" if rank in (1, 2) else "feature map"


def _sizes(value: Any) -> tuple[int, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(max(dim.dim_value, -1) if dim.WhichOneof("value") == "dim_value" else -1 for dim in dims)


Provider = Literal["cpu", "cuda", "tensorrt"]
PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# ONNX Runtime's error if a provider can't run the whole graph and the CPU must not run the rest.
LEFT_TO_CPU = "fallback to CPU EP has been explicitly disabled"


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise Missing("onnxruntime is not installed; install the extra `cpu` or `gpu`") from error
    return onnxruntime


def ort_errors(ort: Any) -> tuple[type[Exception], ...]:
    state = ort.capi.onnxruntime_pybind11_state
    return (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NotImplemented,
        state.RuntimeException,
    )


def require_provider(available: list[str], provider: Provider) -> None:
    name = PROVIDERS[provider]
    if name not in available:
        raise Missing(
            f"ONNX Runtime here has no {name}, only {', '.join(available)}: (a) install onnxruntime-gpu instead of "
            f"onnxruntime, (b) check the CUDA libraries, (c) measure with provider cpu"
        )


def session_options(threads: int | None, *, log_severity: int = 3) -> Any:
    """Return session options with a number of threads, None for as many as a quota grants."""
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = log_severity
    if (threads := thread_limit() if threads is None else threads) is not None:
        options.intra_op_num_threads = threads
    # Spinning threads take the CPU from the other session of a comparison: with spinning the same digits graph at
    # batch 8 took 3.9 or 7.3 ms in turn, without it always 4.1 ms.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def open_session(path: Path, provider: Provider, options: Any, provider_options: Mapping[str, str]) -> Any:
    """Open a graph. Raises BadInput if it can't be loaded, Missing if another provider would run part of it."""
    ort = import_onnxruntime()
    try:
        # Otherwise ONNX Runtime's Python code falls back to another provider, here or at a call.
        session = ort.InferenceSession(
            str(path), options, providers=[(PROVIDERS[provider], dict(provider_options))], enable_fallback=0
        )
    except ort_errors(ort) as error:
        if is_out_of_memory(error):
            raise
        if LEFT_TO_CPU in str(error):
            raise Missing(
                f"{path}: asked ONNX Runtime for {PROVIDERS[provider]}, which leaves nodes of this graph to the CPU: "
                f"time it with provider cpu, or build an engine of it ({error!s:.300})"
            ) from error
        raise BadInput(f"{path}: ONNX Runtime cannot load it: {error}") from error
    granted = session.get_providers()
    if PROVIDERS[provider] not in granted:
        raise Missing(
            f"asked ONNX Runtime for {PROVIDERS[provider]} and got {', '.join(granted)}: its libraries failed to load; "
            f"check the driver and the CUDA, cuDNN and TensorRT versions that this onnxruntime-gpu was built for"
        )
    return session
