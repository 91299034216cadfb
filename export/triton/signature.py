"""What an artefact takes and gives, read from the artefact itself, in the words of an inference server."""

from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, ValueInfoProto

from export.engine.options import BatchProfile
from export.engine.record import EngineRecord, Port
from export.graph.check import load_onnx
from ground.errors import BadInput

_SERVED_TYPES: dict[int, str] = {
    TensorProto.FLOAT: "TYPE_FP32",
    TensorProto.FLOAT16: "TYPE_FP16",
    TensorProto.DOUBLE: "TYPE_FP64",
    TensorProto.BFLOAT16: "TYPE_BF16",
    TensorProto.BOOL: "TYPE_BOOL",
    TensorProto.STRING: "TYPE_STRING",
    TensorProto.INT8: "TYPE_INT8",
    TensorProto.INT16: "TYPE_INT16",
    TensorProto.INT32: "TYPE_INT32",
    TensorProto.INT64: "TYPE_INT64",
    TensorProto.UINT8: "TYPE_UINT8",
    TensorProto.UINT16: "TYPE_UINT16",
    TensorProto.UINT32: "TYPE_UINT32",
    TensorProto.UINT64: "TYPE_UINT64",
}
_NAMED_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int64": "TYPE_INT64", "int32": "TYPE_INT32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One input or output; `shape` holds the batch first, a symbolic size as its name."""

    name: str
    data_type: str
    shape: tuple[int | str, ...]

    def dims(self, *, batched: bool) -> tuple[int, ...]:
        """As a server writes them: without the batch when it batches, -1 for what is open."""
        return tuple(size if isinstance(size, int) else -1 for size in self.shape[int(batched) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """`profiles` are the batch ranges of a plan, `opset` and `ir` the versions of a graph; 0 where there is none."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    profiles: tuple[BatchProfile, ...] = ()
    opset: int = 0
    ir: int = 0

    @property
    def fixed_batch(self) -> int | None:
        """The only batch it takes; None when the batch is open."""
        size = self.inputs[0].shape[0] if self.inputs and self.inputs[0].shape else None
        return size if isinstance(size, int) else None

    @property
    def smallest_batch(self) -> int:
        return min((profile.smallest for profile in self.profiles), default=1)

    @property
    def largest_batch(self) -> int | None:
        """Over all profiles; None when nothing limits it."""
        return max((profile.largest for profile in self.profiles), default=None)

    @property
    def profile_batches(self) -> tuple[int, ...]:
        """Every smallest, tuned and largest batch, each once, rising."""
        sizes = {size for profile in self.profiles for size in (profile.smallest, profile.tuned, profile.largest)}
        return tuple(sorted(sizes))


def signature_from_onnx(path: Path) -> Signature:
    """Reads the graph's borders; BadInput when the file is no ONNX."""
    proto = load_onnx(path)
    stored = {tensor.name for tensor in proto.graph.initializer}
    return Signature(
        inputs=tuple(_tensor(value, path) for value in proto.graph.input if value.name not in stored),
        outputs=tuple(_tensor(value, path) for value in proto.graph.output),
        opset=max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0),
        ir=proto.ir_version,
    )


def signature_from_record(record: EngineRecord) -> Signature:
    """What the plan of this record takes and gives."""
    return Signature(
        inputs=tuple(map(_recorded, record.inputs)),
        outputs=tuple(map(_recorded, record.outputs)),
        profiles=tuple(map(BatchProfile.from_text, record.profiles)),
    )


def _tensor(value: ValueInfoProto, path: Path) -> Tensor:
    tensor = value.type.tensor_type
    if tensor.elem_type not in _SERVED_TYPES:
        kind = onnx.TensorProto.DataType.Name(tensor.elem_type)
        raise BadInput(
            f"{path}: {value.name} is {kind}, which no inference server type stands for; export it as float32"
        )
    shape = tuple(dim.dim_param or dim.dim_value or "?" for dim in tensor.shape.dim)
    return Tensor(name=value.name, data_type=_SERVED_TYPES[tensor.elem_type], shape=shape)


def _recorded(port: Port) -> Tensor:
    if port.dtype not in _NAMED_TYPES:
        raise BadInput(f"engine record: {port.name} is {port.dtype!r}; known are {', '.join(_NAMED_TYPES)}")
    return Tensor(name=port.name, data_type=_NAMED_TYPES[port.dtype], shape=port.shape)
