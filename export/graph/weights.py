"""The weight matrices of an ONNX graph: which node reads them, how they are typed, whether they are k:n sparse."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from ground.precision import BY_ONNX

READERS = ("MatMul", "Gemm", "Conv")


def weight_shares(proto: ModelProto) -> dict[str, float]:
    """Of the matrix weights' elements the share, in (0, 1], that each floating type holds, by its name."""
    elements, total = Counter[str](), 0
    for _, _, tensor in read_matrices(proto):
        total += math.prod(tensor.dims)
        if (float_type := BY_ONNX.get(tensor.data_type)) is not None:
            elements[float_type.name] += math.prod(tensor.dims)
    return {name: count / total for name, count in sorted(elements.items())}


def sparse_matrices(proto: ModelProto, kept: int = 2, of: int = 4) -> dict[str, bool]:
    """By node whether at most `kept` of every `of` neighbouring weights along the summed axis are not zero.

    Of a convolution groups run along the input channels at each place of the kernel, as TensorRT counts them. Left out
    are matrices that sum over no multiple of `of`, as a patch embedding over three colours does.
    """
    holds = {}
    for node, index, tensor in read_matrices(proto):
        matrix = _summed_last(node, index, tensor)
        if not matrix.shape[-1] % of:
            groups = np.ascontiguousarray(matrix).reshape(-1, of)
            holds[name_of(node)] = bool(len(groups)) and int((groups != 0).sum(axis=1).max()) <= kept
    return holds


def name_of(node: NodeProto) -> str:
    """As messages and records call it."""
    return node.name or node.output[0]


def module_of(node: NodeProto) -> str:
    """`blocks.3.attn/MatMul_1` -> `blocks.3.attn`, the path of its module."""
    return node.name.rpartition("/")[0]


def attribute_of(node: NodeProto, name: str, default: int = 0) -> int:
    """A whole number that a node carries."""
    return next((each.i for each in node.attribute if each.name == name), default)


def readers_by_value(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """The nodes that read each value, in graph order."""
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    return readers


def notes_of(proto: ModelProto) -> dict[str, str]:
    """What a graph says of itself."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def drop_unread(graph: GraphProto) -> None:
    """Remove the stored tensors that nothing reads."""
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in read:
            del graph.initializer[index]


def element_types(graph: GraphProto) -> dict[str, int]:
    """ONNX element type by value name, as far as the graph names them."""
    typed = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    return typed | {tensor.name: tensor.data_type for tensor in graph.initializer}


def read_matrices(proto: ModelProto) -> Iterator[tuple[NodeProto, int, TensorProto]]:
    """Every reader with the place of a stored operand of rank 2 and more, and that; quantised ones as stored."""
    stored = {tensor.name: tensor for tensor in proto.graph.initializer if len(tensor.dims) >= 2}
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
        if node.op_type in READERS:
            for index, name in enumerate(node.input[:2]):
                if name in stored:
                    yield node, index, stored[name]


def _summed_last(node: NodeProto, index: int, tensor: TensorProto) -> NDArray[np.generic]:
    """A matrix with the axis that its node sums over last."""
    matrix = numpy_helper.to_array(tensor)
    if node.op_type == "Conv":
        return np.moveaxis(matrix, 1, -1)
    if node.op_type == "Gemm":
        transposed = bool(attribute_of(node, ("transA", "transB")[index]))
        return np.moveaxis(matrix, int(transposed == bool(index)), -1)
    return np.moveaxis(matrix, -1 if index == 0 else -2, -1)
