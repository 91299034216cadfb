"""The ports of an ONNX graph: what it takes and gives, and the note in which it says what that is for.

A graph without a note is a classifier of images: one input `images`, one output `logits`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from onnx import ModelProto, ValueInfoProto

from ground.onnx_types import dtype_of
from ground.ports import LOGITS, OutputPort, Port, Role, image_port, is_fusion_break
from ground.records import Positive, record_from_text

T = TypeVar("T")
INPUTS_KEY, OUTPUTS_KEY = "export.inputs", "export.outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPort:
    """One input or output as a graph shows it: the batch in front, a symbolic size as its name, an open one as "?"."""

    name: str
    dtype: str
    shape: Annotated[tuple[Positive | str, ...], msgspec.Meta(min_length=1)]


def graph_inputs(proto: ModelProto) -> list[ValueInfoProto]:
    """Inputs that a caller fills: weights may be listed among a graph's inputs too."""
    stored = {tensor.name for tensor in proto.graph.initializer}
    return [value for value in proto.graph.input if value.name not in stored]


def graph_outputs(proto: ModelProto, *, breaks: bool = False) -> list[ValueInfoProto]:
    """Outputs that a caller asks for; or the fusion breaks beside them."""
    return [value for value in proto.graph.output if is_fusion_break(value.name) == breaks]


def ports_of_graph(proto: ModelProto, *, breaks: bool = False) -> tuple[tuple[GraphPort, ...], tuple[GraphPort, ...]]:
    """The graph's inputs and outputs; with `breaks` its fusion breaks in place of its outputs."""
    return tuple(map(_graph_port, graph_inputs(proto))), tuple(map(_graph_port, graph_outputs(proto, breaks=breaks)))


def roles_of_graph(proto: ModelProto) -> dict[str, Role]:
    """What outputs are for that are not logits, by their names."""
    return {port.name: port.role for port in noted_outputs(proto) if port.role != LOGITS.role}


def port_notes(inputs: Sequence[Port], outputs: Sequence[OutputPort]) -> dict[str, str]:
    """Metadata that say what the ports are; none for those of a classifier of images."""
    notes = {}
    if not _is_images(inputs):
        notes[INPUTS_KEY] = msgspec.json.encode(inputs).decode()
    if list(outputs) != [LOGITS]:
        notes[OUTPUTS_KEY] = msgspec.json.encode(outputs).decode()
    return notes


def noted_inputs(proto: ModelProto) -> list[Port] | None:
    """The inputs by the graph's own note; None for images of a size that no note tells."""
    text = _note(proto, INPUTS_KEY)
    return None if text is None else _read(text, list[Port], INPUTS_KEY)


def noted_outputs(proto: ModelProto) -> list[OutputPort]:
    """The outputs by the graph's own note, the logits alone without one."""
    text = _note(proto, OUTPUTS_KEY)
    return [LOGITS] if text is None else _read(text, list[OutputPort], OUTPUTS_KEY)


def _graph_port(value: ValueInfoProto) -> GraphPort:
    dims = value.type.tensor_type.shape.dim
    shape = tuple(dim.dim_param or (dim.dim_value if dim.dim_value > 0 else "?") for dim in dims)
    return GraphPort(name=value.name, dtype=dtype_of(value), shape=shape)


def _is_images(inputs: Sequence[Port]) -> bool:
    shape = inputs[0].shape
    return len(shape) == 3 and list(inputs) == [image_port((shape[0], shape[1], shape[2]))]


def _note(proto: ModelProto, key: str) -> str | None:
    return next((entry.value for entry in proto.metadata_props if entry.key == key), None)


def _read(text: str, kind: type[T], key: str) -> T:
    return record_from_text(text, kind, where=f"the note {key} can't be read", remedy="export the model again")
