"""From which operator set on a graph's operators take the types that it holds."""

from collections.abc import Iterator, Sequence

import onnx
from onnx import ModelProto, NodeProto, TensorProto, shape_inference

from ground.precision import BFLOAT16

from .weights import element_types

OPSETS = range(17, 24)  # LayerNormalization is an operator from 17 on; 24 is not read by the parsers in use


def unsupported_nodes(proto: ModelProto) -> list[tuple[NodeProto, int | None]]:
    """Every node that holds bfloat16 where its operator, in the graph's operator set, takes other types alone; with the
    first of OPSETS in which it does, None where none does.

    onnx.checker compares no types with an operator's own, and builders name them one by one.
    """
    version = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    try:
        types = element_types(shape_inference.infer_shapes(proto).graph)
    except shape_inference.InferenceError:
        return []  # no valid graph: the checker says what is wrong with it
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
        "tensor(bfloat16)" in allowed
        for names, parameters in ((node.input, schema.inputs), (node.output, schema.outputs))
        for name, allowed in _allowed(names, parameters)
        if types.get(name) == TensorProto.BFLOAT16
    )


def _allowed(
    names: Sequence[str], parameters: Sequence[onnx.defs.OpSchema.FormalParameter]
) -> Iterator[tuple[str, set[str]]]:
    """Each value with the types that it may have; the last parameter of an operator stands for all further values."""
    for place, name in enumerate(names):
        if name and parameters:
            yield name, set(parameters[min(place, len(parameters) - 1)].types)
