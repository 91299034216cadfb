"""Reasons why an ONNX graph can't become an engine, found before a builder starts."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, TensorProto, shape_inference

from ground.errors import BadInput
from ground.onnx_file import checker_error, iter_tensors, read_onnx
from ground.ports import OutputPort, Port
from ground.precision import (
    BFLOAT16,
    BY_ONNX,
    FLOAT32,
    HALVES,
    QUANTISED,
    FloatType,
    Precision,
    mixed_with_float32,
    precision_by_name,
)

from .ports import port_mismatches
from .weights import attribute_of, declared_types, name_of, notes_of, read_matrices

OPSETS = range(17, 24)  # LayerNormalization is an operator from 17 on; no parser in use reads 24


def unsupported_nodes(proto: ModelProto) -> list[tuple[NodeProto, int | None]]:
    """Return nodes whose operator lacks the bfloat16 that it gets, each with the first of OPSETS that has it, or None.

    onnx.checker doesn't compare types with those of operators, and builders report one node at a time.
    """
    version = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    try:
        types = declared_types(shape_inference.infer_shapes(proto).graph)
    except shape_inference.InferenceError:
        return []  # an invalid graph, which onnx.checker describes
    if BFLOAT16.onnx not in types.values():
        return []
    return [
        (node, next((newer for newer in OPSETS if _supports_bfloat16(node, types, newer)), None))
        for node in proto.graph.node
        if node.domain in ("", "ai.onnx") and not _supports_bfloat16(node, types, version)
    ]


def _supports_bfloat16(node: NodeProto, types: dict[str, int], version: int) -> bool:
    if not onnx.defs.has(node.op_type, version):
        return False
    schema = onnx.defs.get_schema(node.op_type, version)
    return all(
        "tensor(bfloat16)" in parameters[min(place, len(parameters) - 1)].types  # the last one may be variadic
        for names, parameters in ((node.input, schema.inputs), (node.output, schema.outputs))
        for place, name in enumerate(names)
        if parameters and types.get(name) == TensorProto.BFLOAT16
    )


MAX_BYTES = 2_000_000_000
_LOCAL_PATH = re.compile(r"""(^|[\s'"=:(,\[])(/[\w.+-]+/[\w.+-]+|~/[\w.+-]+|[A-Za-z]:\\[\w.+-]+)""")
_PRECISION_KEY = "export.precision"
Weight = tuple[str, FloatType | None]
"""The name of a node and the type of the matrix that it reads; None for another type."""
SPELLED_OUT = "norms are spelled out in"


def load_onnx(path: Path) -> ModelProto:
    """Read a graph without external weights. Raises BadInput as read_onnx does, and for a file without a graph."""
    proto = read_onnx(path, weights=False)
    if not proto.ir_version or not proto.graph.node or not proto.opset_import:
        raise BadInput(f"{path}: not an ONNX model, or cut short: it has no graph or no opset; export it again")
    return proto


def require_onnx(path: Path, *, precision: str | None = None, backend: str = "tensorrt") -> ModelProto:
    proto = load_onnx(path)
    reasons = check_onnx(proto, precision=precision, backend=backend)
    if reasons:
        listed = "\n".join(f"  {line}" for line in reasons)
        raise BadInput(f"{path}: this graph can't be built with {backend}:\n{listed}")
    return proto


def check_onnx(
    proto: ModelProto,
    *,
    precision: str | None = None,
    backend: str = "tensorrt",
    inputs: Sequence[Port] | None = None,
    outputs: Sequence[OutputPort] | None = None,
) -> list[str]:
    """Return all reasons why this graph can't become an engine.

    `precision` is the expected precision, `inputs` and `outputs` are the expected ports; None takes the graph's notes.
    """
    reasons = [*_file_reasons(proto, backend)] or [*_operator_reasons(proto)]
    if not reasons and (invalid := checker_error(proto, full=True)):
        reasons = [f"onnx.checker: {invalid}"]
    if reasons:
        return reasons  # the other checks need shapes and types, which only a valid graph has
    return [
        *port_mismatches(proto, inputs, outputs),
        *_name_reasons(proto),
        *_typing_reasons(proto, precision or notes_of(proto).get(_PRECISION_KEY)),
        *(_attention_reasons(proto) if backend != "onnxruntime" else ()),
    ]


def _file_reasons(proto: ModelProto, backend: str) -> Iterator[str]:
    outside = [tensor.name for tensor in iter_tensors(proto) if tensor.data_location == TensorProto.EXTERNAL]
    if outside:
        yield f"{len(outside)} weights lie in another file (first {outside[0]!r}); save the model as one file"
    size_bytes = proto.ByteSize()
    if size_bytes >= MAX_BYTES:
        yield f"the model has {size_bytes} bytes; a single ONNX file must stay under {MAX_BYTES}"
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx"):
            if entry.version not in OPSETS:
                yield f"opset {entry.version} is outside {OPSETS[0]} to {OPSETS[-1]}; export with opset 20"
        elif backend != "onnxruntime" and any(node.domain == entry.domain for node in proto.graph.node):
            yield f"operators of the domain {entry.domain!r} are used, which {backend} does not know"
    if not any(entry.domain in ("", "ai.onnx") for entry in proto.opset_import):
        yield "no opset of the standard operators is named"


def _name_reasons(proto: ModelProto) -> Iterator[str]:
    counts = Counter(node.name for node in proto.graph.node if node.name)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        yield f"{len(twice)} node names are used more than once (first {twice[0]!r}); export it again"
    graph = proto.graph
    holders = [proto, graph, *graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output]
    notes = [(entry.key, entry.value) for holder in holders for entry in holder.metadata_props]
    notes += [("doc_string", holder.doc_string) for holder in holders]
    leaks = [(key, match.group(2)) for key, text in notes if (match := _LOCAL_PATH.search(text))]
    if leaks:
        yield f"{len(leaks)} notes hold a local path (first {leaks[0][0]!r}: {leaks[0][1]}...); strip them"


def _operator_reasons(proto: ModelProto) -> Iterator[str]:
    by_first: dict[int | None, list[NodeProto]] = defaultdict(list)
    for node, first in unsupported_nodes(proto):
        by_first[first].append(node)
    for first, nodes in sorted(by_first.items(), key=lambda each: each[0] or OPSETS.stop):
        operators, at = ", ".join(dict.fromkeys(node.op_type for node in nodes)), name_of(nodes[0])
        if first is None:
            yield f"{operators} takes no bfloat16 up to opset {OPSETS[-1]} (first at {at}); keep it in float32"
        else:
            remedy = f"export with opset {first} or newer"
            yield f"{operators} takes no bfloat16 before opset {first} (first at {at}); {remedy}"


def _typing_reasons(proto: ModelProto, precision_name: str | None) -> Iterator[str]:
    weights = [(name_of(node), BY_ONNX.get(tensor.data_type)) for node, _, tensor in read_matrices(proto)]
    if precision_name is not None and precision_name in QUANTISED:
        if all(float_type is not QUANTISED[precision_name] for _, float_type in weights):
            yield f"called {precision_name} but none of its {len(weights)} weight matrices is stored so; export again"
    elif precision_name is not None:
        try:
            yield from _weight_type_reasons(precision_by_name(precision_name), weights)
        except BadInput as error:
            yield str(error)
    yield from _norm_reasons(proto)


def _weight_type_reasons(precision: Precision, weights: Sequence[Weight]) -> Iterator[str]:
    others = [(node, each) for node, each in weights if each not in (precision.type, None)]
    called, name, every = f"called {precision.name} but", precision.type.name, f"{len(weights)} weight matrices"
    if precision.type is not FLOAT32 and all(each is not precision.type for _, each in weights):
        types = [each for _, each in others if each is not None]
        narrow = next((each for each in types if each in HALVES), None)
        mixed = None if narrow is None else mixed_with_float32(narrow)
        held_in = "fp32" if mixed is None else mixed.name if FLOAT32 in types else mixed.pure
        yield f"{called} none of its {every} is {name}; call it {held_in}"
        return
    if precision.mixed and not others:
        yield f"{called} every weight matrix is {name}; call it {precision.pure}"
    stray = [(node, each) for node, each in others if not precision.mixed or each is not FLOAT32]
    if stray:
        types_text = " or ".join(dict.fromkeys(each.name for _, each in stray if each is not None))
        yield f"{called} {len(stray)} of {every} are {types_text} (first at {stray[0][0]})"


def _norm_reasons(proto: ModelProto) -> Iterator[str]:
    if not any(node.op_type == "Sqrt" for node in proto.graph.node):
        return
    types = declared_types(onnx.shape_inference.infer_shapes(proto).graph)
    for float_type in HALVES:
        spelled_out = [root for root, mean in decomposed_norms(proto) if types.get(mean.input[0]) == float_type.onnx]
        if spelled_out:
            yield (
                f"{len(spelled_out)} {SPELLED_OUT} {float_type.name} (ReduceMean, Sqrt; first at "
                f"{name_of(spelled_out[0])}); export them as one operator (LayerNormalization, or RMSNormalization "
                "from opset 23), or keep them in float32"
            )


def decomposed_norms(proto: ModelProto) -> Iterator[tuple[NodeProto, NodeProto]]:
    """Yield the Sqrt and the ReduceMean of each norm that is made of several operators."""
    producers = {name: node for node in proto.graph.node for name in node.output}
    for node in proto.graph.node:
        if node.op_type == "Sqrt" and (mean := _mean_below(node, producers)) is not None:
            yield node, mean


def _mean_below(root: NodeProto, producers: Mapping[str, NodeProto]) -> NodeProto | None:
    inputs = [producers[name] for name in root.input if name in producers]
    for node in inputs:
        if node.op_type == "ReduceMean":
            return node
        if node.op_type in ("Add", "Max", "Clip") and (mean := _mean_below(node, producers)) is not None:
            return mean
    return None


def _attention_reasons(proto: ModelProto) -> Iterator[str]:
    if not (nodes := [node for node in proto.graph.node if node.op_type == "Attention"]):
        return
    inferred = onnx.shape_inference.infer_shapes(proto)
    types = declared_types(inferred.graph)
    for node in nodes:
        widths = _key_value_widths(inferred, node)
        if widths is None or widths[0] != widths[1]:
            yield (
                f"{name_of(node)}: the Attention operator needs equal widths of k and v, got "
                f"{widths or 'unknown ones'}; export with opset 20 and plain MatMul-Softmax-MatMul, or pad q and k"
            )
        elif types.get(node.input[0]) == TensorProto.FLOAT:
            yield f"{name_of(node)}: no kernel computes the Attention operator in float32; export with opset 20"


def _key_value_widths(proto: ModelProto, node: NodeProto) -> tuple[int, int] | None:
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in proto.graph.value_info
    }
    keys, values = (shapes.get(name, []) for name in node.input[1:3])
    heads = attribute_of(node, "kv_num_heads") or 1
    if not keys or not values or 0 in (keys[-1], values[-1]):
        return None
    return (keys[-1] // heads, values[-1] // heads) if len(keys) == 3 else (keys[-1], values[-1])
