"""Reasons why an ONNX graph will not do for an engine, found before any builder is started."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, TensorProto

from ground.errors import BadInput
from ground.files import regular
from ground.ports import OutputPort, Port

from .borders import border_reasons
from .weights import element_types, matmul_weights

OPSETS = range(17, 24)  # LayerNormalization is an operator from 17 on; 24 is not read by the parsers in use
MAX_BYTES = 2_000_000_000
_LOCAL_PATH = re.compile(r"""(^|[\s'"=:(,\[])(/[\w.+-]+/[\w.+-]+|~/[\w.+-]+|[A-Za-z]:\\[\w.+-]+)""")
_PRECISION_KEY = "export.precision"
SPELLED_OUT = "norms are spelled out in float16"


def load_onnx(path: Path) -> ModelProto:
    """The graph in `path` with its weights inside; BadInput for what is missing, empty, cut short or no ONNX at all."""
    try:
        content = regular(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: can't be read ({error.strerror})") from error
    if not content:
        raise BadInput(f"{path}: the file is empty; export the model again")
    try:
        proto = onnx.load_model_from_string(content)
    except DecodeError as error:
        raise BadInput(f"{path}: not an ONNX file, or cut short ({len(content)} bytes); export it again") from error
    if not proto.ir_version or not proto.graph.node or not proto.opset_import:
        raise BadInput(f"{path}: not an ONNX model, or cut short: it has no graph or no opset; export it again")
    return proto


def require_onnx(path: Path, *, precision: str | None = None, backend: str = "tensorrt") -> ModelProto:
    """The graph in `path` when check_onnx finds nothing against it, else BadInput with every reason."""
    proto = load_onnx(path)
    reasons = check_onnx(proto, precision=precision, backend=backend)
    if reasons:
        raise BadInput(f"{path}: this graph will not do for {backend}:\n" + "\n".join(f"  {line}" for line in reasons))
    return proto


def check_onnx(
    source: Path | ModelProto,
    *,
    precision: str | None = None,
    backend: str = "tensorrt",
    inputs: Sequence[Port] | None = None,
    outputs: Sequence[OutputPort] | None = None,
) -> list[str]:
    """Every reason why this graph will not do, empty when it will.

    `precision` fp32, fp16 or mixed is what the caller calls the graph, `inputs` and `outputs` what it must take and
    give; None takes the graph's own word, and one without any is a classifier of images.
    """
    if isinstance(source, Path):
        try:
            source = load_onnx(source)
        except BadInput as error:
            return [str(error)]
    reasons = [*_storage_reasons(source), *_opset_reasons(source, backend)]
    if not reasons:
        reasons += _validity_reasons(source)
    if reasons:
        return reasons  # what follows reads shapes and types, which only a valid graph has
    labels = {entry.key: entry.value for entry in source.metadata_props}
    return [
        *border_reasons(source, inputs, outputs),
        *_name_reasons(source),
        *_typing_reasons(source, precision or labels.get(_PRECISION_KEY)),
        *(_attention_reasons(source) if backend != "onnxruntime" else ()),
    ]


def _storage_reasons(proto: ModelProto) -> Iterator[str]:
    outside = [tensor.name for tensor in proto.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    if outside:
        yield f"{len(outside)} weights lie in another file (first {outside[0]!r}); save the model as one file"
    size_bytes = proto.ByteSize()
    if size_bytes >= MAX_BYTES:
        yield f"the model has {size_bytes} bytes; a single ONNX file must stay under {MAX_BYTES}"


def _opset_reasons(proto: ModelProto, backend: str) -> Iterator[str]:
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx"):
            if entry.version not in OPSETS:
                yield f"opset {entry.version} is outside {OPSETS[0]} to {OPSETS[-1]}; export with opset 20"
        elif backend != "onnxruntime" and any(node.domain == entry.domain for node in proto.graph.node):
            yield f"operators of the domain {entry.domain!r} are used, which {backend} does not know"
    if not any(entry.domain in ("", "ai.onnx") for entry in proto.opset_import):
        yield "no opset of the standard operators is named"


def _validity_reasons(proto: ModelProto) -> Iterator[str]:
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        yield f"onnx.checker: {' '.join(str(error).split())}"


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


def _typing_reasons(proto: ModelProto, precision: str | None) -> Iterator[str]:
    if precision not in (None, "fp32", "fp16", "mixed"):
        yield f"precision {precision!r} is unknown"
    weights = matmul_weights(proto)
    fp16 = [weight for weight in weights if weight.fp16]
    fp32 = [weight for weight in weights if not weight.fp16]
    if precision in ("fp16", "mixed") and not fp16:
        yield f"called {precision} but none of its {len(weights)} weight matrices is float16; call it fp32"
    elif precision == "fp16" and fp32:
        yield f"called fp16 but {len(fp32)} of {len(weights)} weight matrices are float32 (first at {fp32[0].node})"
    elif precision == "fp32" and fp16:
        yield f"called fp32 but {len(fp16)} of {len(weights)} weight matrices are float16 (first at {fp16[0].node})"
    elif precision == "mixed" and not fp32:
        yield "called mixed but every weight matrix is float16; call it fp16"
    if fp16:
        yield from _norm_reasons(proto)


def _norm_reasons(proto: ModelProto) -> Iterator[str]:
    """Norms whose mean of squares is summed in float16, where it overflows; their operators sum in float32."""
    if not any(node.op_type == "Sqrt" for node in proto.graph.node):
        return
    types = element_types(onnx.shape_inference.infer_shapes(proto).graph)
    producers = {name: node for node in proto.graph.node for name in node.output}
    spelled_out = []
    for node in proto.graph.node:
        if node.op_type == "Sqrt":
            mean = _mean_below(node, producers)
            if mean is not None and types.get(mean.input[0]) == TensorProto.FLOAT16:
                spelled_out.append(node.name or node.output[0])
    if spelled_out:
        yield (
            f"{len(spelled_out)} {SPELLED_OUT} (ReduceMean, Sqrt; first at {spelled_out[0]}); export them as one "
            "operator (LayerNormalization, or RMSNormalization from opset 23), or keep them in float32"
        )


def _mean_below(root: NodeProto, producers: Mapping[str, NodeProto]) -> NodeProto | None:
    """The mean that a root is taken of, with an epsilon added or a floor on the way."""
    behind = [producers[name] for name in root.input if name in producers]
    for node in behind:
        if node.op_type == "ReduceMean":
            return node
        if node.op_type in ("Add", "Max", "Clip") and (mean := _mean_below(node, producers)) is not None:
            return mean
    return None


def _attention_reasons(proto: ModelProto) -> Iterator[str]:
    if not any(node.op_type == "Attention" for node in proto.graph.node):
        return
    inferred = onnx.shape_inference.infer_shapes(proto)
    types = element_types(inferred.graph)
    for node in inferred.graph.node:
        if node.op_type == "Attention":
            where = node.name or node.output[0]
            widths = _key_value_widths(inferred, node)
            if widths is None or widths[0] != widths[1]:
                yield (
                    f"{where}: the Attention operator needs equal widths of k and v, got {widths or 'unknown ones'}; "
                    "export with opset 20 and plain MatMul-Softmax-MatMul, or pad q and k"
                )
            elif types.get(node.input[0]) == TensorProto.FLOAT:
                yield f"{where}: no kernel computes the Attention operator in float32; export with opset 20"


def _key_value_widths(proto: ModelProto, node: NodeProto) -> tuple[int, int] | None:
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in proto.graph.value_info
    }
    keys, values = (shapes.get(name, []) for name in node.input[1:3])
    heads = _flag(node, "kv_num_heads") or 1
    if not keys or not values or 0 in (keys[-1], values[-1]):
        return None
    return (keys[-1] // heads, values[-1] // heads) if len(keys) == 3 else (keys[-1], values[-1])


def _flag(node: NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)
