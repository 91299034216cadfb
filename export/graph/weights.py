"""The weight matrices of an ONNX graph: the nodes that read them, their types and their k:n sparsity."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from ground.precision import BY_ONNX

READERS = ("MatMul", "Gemm", "Conv")


def weight_shares(proto: ModelProto) -> dict[str, float]:
    """Return by type the share of the elements of all weight matrices that are of that type."""
    elements, total = Counter[str](), 0
    for _, _, tensor in read_matrices(proto):
        total += math.prod(tensor.dims)
        if (float_type := BY_ONNX.get(tensor.data_type)) is not None:
            elements[float_type.name] += math.prod(tensor.dims)
    return {name: count / total for name, count in sorted(elements.items())}


def sparse_matrices(proto: ModelProto, kept: int = 2, of: int = 4) -> dict[str, bool]:
    """Return by node whether at most `kept` of every `of` neighbouring weights along the summed axis are not zero.

    For convolutions that axis is the input channels, as TensorRT counts. Matrices whose summed axis is no multiple of
    `of` are left out.
    """
    holds = {}
    for node, index, tensor in read_matrices(proto):
        matrix = _summed_last(node, index, tensor)
        if not matrix.shape[-1] % of:
            groups = np.ascontiguousarray(matrix).reshape(-1, of)
            holds[name_of(node)] = bool(len(groups)) and int((groups != 0).sum(axis=1).max()) <= kept
    return holds


def name_of(node: NodeProto) -> str:
    return node.name or node.output[0]


def module_of_node(node: NodeProto) -> str:
    """Return the path of a node's module: `blocks.3.attn` for `blocks.3.attn/MatMul_1`."""
    return node.name.rpartition("/")[0]


def attribute_of(node: NodeProto, name: str) -> int:
    return next((each.i for each in node.attribute if each.name == name), 0)


def readers_by_value(graph: GraphProto) -> dict[str, list[NodeProto]]:
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    return readers


def notes_of(proto: ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def drop_unread(graph: GraphProto) -> None:
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in read:
            del graph.initializer[index]


def declared_types(graph: GraphProto) -> dict[str, int]:
    typed = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    return typed | {tensor.name: tensor.data_type for tensor in graph.initializer}


def read_matrices(proto: ModelProto) -> Iterator[tuple[NodeProto, int, TensorProto]]:
    """Yield each node that multiplies by a stored matrix, the index of that input (0 or 1), and the matrix."""
    stored = {tensor.name: tensor for tensor in proto.graph.initializer if len(tensor.dims) >= 2}
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
        if node.op_type in READERS:
            for index, name in enumerate(node.input[:2]):
                if name in stored:
                    yield node, index, stored[name]


def _summed_last(node: NodeProto, index: int, tensor: TensorProto) -> NDArray[np.generic]:
    matrix = numpy_helper.to_array(tensor)
    if node.op_type == "Conv":
        return np.moveaxis(matrix, 1, -1)
    if node.op_type == "Gemm":
        transposed = bool(attribute_of(node, ("transA", "transB")[index]))
        return np.moveaxis(matrix, int(transposed == bool(index)), -1)
    return np.moveaxis(matrix, -1 if index == 0 else -2, -1)
