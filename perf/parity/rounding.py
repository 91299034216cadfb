"""Emulation of FP16, BF16 and FP8 graphs by float32 graphs that round each value to its type.

ONNX Runtime's CPU kernels compute FP16 graphs in float32, where nothing overflows, and have no BF16 products. The
emulation sums in float32 inside an operator, as tensor cores do, and rounds results to nearest, ties to even.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from ground.errors import BadInput
from ground.onnx_file import checker_error, read_onnx
from ground.precision import BY_ONNX, FLOAT8, HALVES

AGAIN = "export it again"
NARROW = tuple(each.onnx for each in HALVES)
SINGLE = TensorProto.FLOAT
# Operators that move values without change, so that they are rounded already.
MOVES = {"Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile",
         "Transpose", "Unsqueeze"}  # fmt: skip


def element_types(model: ModelProto) -> dict[str, int]:
    """Return the element type of each value. Raises BadInput if a node contradicts a declared type or shape."""
    try:
        graph = shape_inference.infer_shapes(model).graph
    except shape_inference.InferenceError as error:
        raise BadInput(f"the graph's declared types or shapes contradict its nodes ({error!s:.200}); {AGAIN}") from None
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    return types | {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}


def rounded_graph(model: ModelProto) -> ModelProto:
    """Return the float32 emulation of a graph, with the same names. Raises BadInput for 16-bit inputs or outputs."""
    types = element_types(model)
    for value in (*model.graph.input, *model.graph.output):
        if types[value.name] in NARROW:
            name = BY_ONNX[types[value.name]].name
            raise BadInput(f"{value.name}: this input or output is {name}, expected float32; export the graph again")
    single = ModelProto()
    single.CopyFrom(model)
    del single.graph.node[:], single.graph.initializer[:], single.graph.value_info[:]
    single.graph.initializer.extend(_widen(tensor) for tensor in model.graph.initializer)
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and types.get(node.input[0]) == FLOAT8.onnx:
            node, scales = _fp8_product(node, model)
            single.graph.initializer.extend([] if scales is None else [scales])
        single.graph.node.extend(_emulate_node(node, types))
    read = {name for node in single.graph.node for name in node.input}
    kept = [tensor for tensor in single.graph.initializer if tensor.name in read]
    del single.graph.initializer[:]
    single.graph.initializer.extend(kept)
    return single


def _emulate_node(node: NodeProto, types: dict[str, int]) -> Iterator[NodeProto]:
    if node.op_type == "QuantizeLinear" and types.get(node.output[0]) == FLOAT8.onnx:
        # Casts round it, because ONNX Runtime passes FP8 values on to operators that don't support them. The
        # dequantisation still multiplies by the scale.
        name = node.output[0]
        yield helper.make_node("Div", node.input[:2], [f"{name}/ratio"], name=f"{name}/divide")
        yield helper.make_node("Cast", [f"{name}/ratio"], [f"{name}/fp8"], name=f"{name}/round", to=FLOAT8.onnx)
        yield helper.make_node("Cast", [f"{name}/fp8"], [name], name=f"{name}/widen", to=SINGLE)
        return
    wide = NodeProto()
    wide.CopyFrom(node)
    for attribute in wide.attribute:
        if attribute.type == AttributeProto.TENSOR:
            attribute.t.CopyFrom(_widen(attribute.t))
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i in NARROW:
            attribute.i = SINGLE
    halves = [] if node.op_type in MOVES else [name for name in node.output if types.get(name) in NARROW]
    for place, name in enumerate(wide.output):
        if name in halves:
            wide.output[place] = f"{name}/wide"
    yield wide
    for name in halves:
        yield helper.make_node("Cast", [f"{name}/wide"], [f"{name}/half"], name=f"{name}/round", to=types[name])
        yield helper.make_node("Cast", [f"{name}/half"], [name], name=f"{name}/widen", to=SINGLE)


def _fp8_product(node: NodeProto, model: ModelProto) -> tuple[NodeProto, TensorProto | None]:
    """Return an FP8 dequantisation as a product, and its scales shaped for broadcasting, None for a single scale.

    Raises BadInput for scales that are not stored in the graph.
    """
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    scale, matrix = stored.get(node.input[1]), stored.get(node.input[0])
    times = helper.make_node("Mul", node.input[:2], node.output, name=node.name)
    if scale is not None and not scale.dims:
        return times, None
    shape = () if matrix is None else tuple(matrix.dims)
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    if scale is None or not 0 <= axis < len(shape) or tuple(scale.dims) != (shape[axis],):
        raise BadInput(
            f"{node.name or node.output[0]}: its FP8 scales are not stored in the graph (one, or one for each index "
            f"of an axis), so its rounding can't be emulated; {AGAIN}"
        )
    along = [-1 if place == axis else 1 for place in range(len(shape))]
    times.input[1] = f"{node.output[0]}/scale"
    values: Any = numpy_helper.to_array(scale).astype("float32").reshape(along)
    return times, numpy_helper.from_array(values, times.input[1])


def _widen(tensor: TensorProto) -> TensorProto:
    if tensor.data_type not in (*NARROW, FLOAT8.onnx):
        return tensor
    values: Any = numpy_helper.to_array(tensor).astype("float32")
    return numpy_helper.from_array(values, tensor.name)


def round_file(source: Path, target: Path) -> None:
    """Write the emulation of a graph file. Raises BadInput as `rounded_graph` does, and for an invalid graph."""
    proto = read_onnx(source)
    if reason := checker_error(proto):
        raise BadInput(f"{source}: onnx.checker: {reason}; {AGAIN}")
    try:
        rounded = rounded_graph(proto)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None
    onnx.save(rounded, str(target))
