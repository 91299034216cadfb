"""The ports of an ONNX graph, the notes on their types and roles, and mismatches with the expected ports.

A graph without these notes is a classifier of images: one input `images`, one output `logits`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from onnx import ModelProto, ValueInfoProto

from ground.errors import BadInput
from ground.onnx_types import dtype_of
from ground.ports import LOGITS, OutputPort, Port, Role, image_port, is_fusion_break
from ground.records import Positive, record_from_text

from .weights import notes_of

T = TypeVar("T")
INPUTS_KEY, OUTPUTS_KEY = "export.inputs", "export.outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPort:
    """An input or output of a graph: the batch comes first, a symbolic size is its name, an unknown one "?"."""

    name: str
    dtype: str
    shape: Annotated[tuple[Positive | str, ...], msgspec.Meta(min_length=1)]

    def dims(self, *, batched: bool) -> tuple[int, ...]:
        """Return the sizes for a server: without the batch if the server batches, -1 for open sizes."""
        return tuple(size if isinstance(size, int) else -1 for size in self.shape[int(batched) :])


def graph_inputs(proto: ModelProto) -> list[ValueInfoProto]:
    """Return the inputs that aren't stored weights."""
    stored = {tensor.name for tensor in proto.graph.initializer}
    return [value for value in proto.graph.input if value.name not in stored]


def graph_outputs(proto: ModelProto, *, breaks: bool = False) -> list[ValueInfoProto]:
    return [value for value in proto.graph.output if is_fusion_break(value.name) == breaks]


def dims_of_value(value: ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def has_fixed_sizes(dims: Sequence[str | int]) -> bool:
    """Return whether a shape has a batch and known sizes after it."""
    return len(dims) > 0 and all(isinstance(size, int) and size > 0 for size in dims[1:])


def ports_of_graph(proto: ModelProto, *, breaks: bool = False) -> tuple[tuple[GraphPort, ...], tuple[GraphPort, ...]]:
    """Return the graph's inputs, and its outputs or, with `breaks`, its fusion breaks."""
    return tuple(map(_graph_port, graph_inputs(proto))), tuple(map(_graph_port, graph_outputs(proto, breaks=breaks)))


def roles_of_graph(proto: ModelProto) -> dict[str, Role]:
    return {port.name: port.role for port in noted_outputs(proto) if port.role != LOGITS.role}


def port_notes(inputs: Sequence[Port], outputs: Sequence[OutputPort]) -> dict[str, str]:
    notes = {}
    shape = inputs[0].shape
    if len(shape) != 3 or list(inputs) != [image_port((shape[0], shape[1], shape[2]))]:
        notes[INPUTS_KEY] = msgspec.json.encode(inputs).decode()
    if list(outputs) != [LOGITS]:
        notes[OUTPUTS_KEY] = msgspec.json.encode(outputs).decode()
    return notes


def noted_inputs(proto: ModelProto) -> list[Port] | None:
    text = notes_of(proto).get(INPUTS_KEY)
    return None if text is None else _read(text, list[Port], INPUTS_KEY)


def noted_outputs(proto: ModelProto) -> list[OutputPort]:
    text = notes_of(proto).get(OUTPUTS_KEY)
    return [LOGITS] if text is None else _read(text, list[OutputPort], OUTPUTS_KEY)


def _graph_port(value: ValueInfoProto) -> GraphPort:
    shape = tuple("?" if isinstance(size, int) and size <= 0 else size for size in dims_of_value(value))
    return GraphPort(name=value.name, dtype=dtype_of(value), shape=shape)


def _read(text: str, kind: type[T], key: str) -> T:
    return record_from_text(text, kind, where=f"the note {key} can't be read", remedy="export the model again")


_RANKS: Mapping[Role, tuple[int, ...]] = {"logits": (1, 2), "token logits": (3,), "embedding": (2,)}
"""Ranks, with the batch, of the roles that need certain ones; logits of rank 1 are one number for each input."""
_POOLED = ("logits", "embedding")
_OWN = "export."
_FOREIGN = ("float32", "float16", "uint8", "int64", "int32", "bool")


def port_mismatches(
    proto: ModelProto, inputs: Sequence[Port] | None, outputs: Sequence[OutputPort] | None
) -> Iterator[str]:
    """Yield mismatches with the expected ports; None takes the ports that the graph's notes describe.

    Graphs of other tools, which have no notes, may have ports of any names and types.
    """
    is_foreign = inputs is None and outputs is None and not any(key.startswith(_OWN) for key in notes_of(proto))
    try:
        inputs = noted_inputs(proto) if inputs is None else inputs
        outputs = noted_outputs(proto) if outputs is None else outputs
    except BadInput as error:
        yield str(error)
        return
    values_in, values_out = graph_inputs(proto), graph_outputs(proto)
    if is_foreign:
        yield from _foreign_reasons(values_in, values_out)
        return
    takes = {
        port.name: {"dtype": port.dtype, "ranks": (1 + len(port.shape),), "sizes": port.shape} for port in inputs or ()
    }
    gives = {
        port.name: {"dtype": "float32", "ranks": _RANKS.get(port.role, ()), "pooled": port.role in _POOLED}
        for port in outputs
    }
    if inputs is None:
        takes = {"images": {"dtype": "float32", "ranks": (4,)}}
    yield from _side_reasons("input", values_in, takes)
    yield from _side_reasons("output", values_out, gives)
    if (len(values_in), len(values_out)) != (len(takes), len(gives)):
        return
    values = [*values_in, *proto.graph.output]
    batches = [next(iter(dims_of_value(value)), None) for value in values]
    if len(set(batches)) > 1 or not batches[0]:
        names = _join_names([value.name for value in values])
        yield f"{names} must share one batch dimension, got {_join_names([repr(batch) for batch in batches])}"


def _foreign_reasons(inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]) -> Iterator[str]:
    if not inputs or not outputs:
        yield f"expected at least one input and one output, got {len(inputs)} and {len(outputs)}"
    for value in inputs:
        if not has_fixed_sizes(dims := dims_of_value(value)):
            yield (
                f"{value.name} must have a fixed size behind the batch, got {dims}; fix it by python -m "
                "onnxruntime.tools.make_dynamic_shape_fixed --dim_param NAME --dim_value SIZE"
            )
        if dtype_of(value) not in _FOREIGN:
            yield f"{value.name} must be one of {', '.join(_FOREIGN)}, got {dtype_of(value)}"
    for value in outputs:
        kind = value.type.tensor_type
        if kind.HasField("shape") and not kind.shape.dim:
            yield f"{value.name} must have a batch in front, with a result for each input, got a single number"


def _side_reasons(side: str, values: Sequence[ValueInfoProto], expected: Mapping[str, Any]) -> Iterator[str]:
    names = list(expected)
    if [value.name for value in values] != names:
        wanted = f"one {side} named {names[0]!r}" if len(names) == 1 else f"the {side}s {', '.join(map(repr, names))}"
        yield f"expected {wanted}, found {', '.join(value.name for value in values) or 'none'}"
        return
    for value in values:
        yield from _tensor_reasons(value, **expected[value.name])


def _tensor_reasons(
    value: ValueInfoProto,
    *,
    dtype: str,
    ranks: tuple[int, ...],
    sizes: tuple[int, ...] | None = None,
    pooled: bool = False,
) -> Iterator[str]:
    """Yield a value's mismatches. `ranks` include the batch, none allows any; `pooled`: one vector for each input."""
    if dtype_of(value) != dtype:
        yield f"{value.name} must be {dtype}, got {dtype_of(value)}"
    dims = dims_of_value(value)
    if not has_fixed_sizes(dims) or (ranks and len(dims) not in ranks):
        ranked = f"rank {' or '.join(map(str, ranks))} with " if ranks else ""
        hint = "; export a model whose output is pooled" if pooled and len(dims) == 3 else ""
        yield f"{value.name} must have {ranked}a fixed size behind the batch, got {dims}{hint}"
    elif sizes is not None and tuple(dims[1:]) != sizes:
        yield f"{value.name} must have the sizes {list(sizes)} behind the batch, got {dims[1:]}"


def _join_names(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
