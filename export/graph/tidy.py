"""The tidying of an exported ONNX graph: names from sites, softmax in float32, each weight once, no exporter notes."""

import ast
import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import takewhile

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ground.errors import BadInput
from ground.precision import BY_ONNX, HALVES, FloatType

from .weights import declared_types, drop_unread, readers_by_value

_SCOPES = "pkg.torch.onnx.name_scopes"  # the exporter's list of module paths; the last entry is the traced operator
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_ABOVE_ZERO: Mapping[int, float] = {
    TensorProto.FLOAT: 2.0**-126,
    TensorProto.BFLOAT16: 2.0**-126,
    TensorProto.FLOAT16: 2.0**-24,
}


def tidy_graph(model: ModelProto, *, modules: Collection[str], parameters: Collection[str]) -> None:
    """Tidy an exported graph, in place; `modules` and `parameters` are the paths of the traced model.

    Folded constants are named after the node that reads them. Raises BadInput for a graph that branches.
    """
    sites = node_sites(model.graph, modules)
    for node in model.graph.node:
        if any(attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for attribute in node.attribute):
            site = sites[node.output[0]] or "the model"
            raise BadInput(f"{site}: the graph branches at run time ({node.op_type}); it must be straight-line code")
    widen_softmax(model.graph, sites)
    narrow_folded(model.graph)
    use_lowest_padding(model.graph)
    merge_initializers(model.graph)
    name_by_site(model.graph, sites, parameters)
    strip_notes(model)


def node_sites(graph: GraphProto, modules: Collection[str]) -> dict[str, str]:
    """Return each node's module path by its first output; a node without one gets its neighbours' common path."""
    sites = {node.output[0]: site for node in graph.node if (site := _traced_site(node, modules)) is not None}
    readers = readers_by_value(graph)
    for node in graph.node:
        if node.output[0] not in sites:
            near = [*node.input, *(reader.output[0] for output in node.output for reader in readers[output])]
            levels = zip(*(sites[name].split(".") for name in near if name in sites), strict=False)
            common = takewhile(lambda parts: len(set(parts)) == 1, levels)
            sites[node.output[0]] = ".".join(parts[0] for parts in common)
    return sites


def widen_softmax(graph: GraphProto, sites: dict[str, str]) -> None:
    """Compute 16-bit softmaxes in float32, by casts around them; the exporter casts only after the exponentials."""
    types, narrow = declared_types(graph), {each.onnx for each in HALVES}
    nodes: list[NodeProto] = []
    for node in graph.node:
        float_type = types.get(node.input[0])
        if node.op_type != "Softmax" or float_type not in narrow:
            nodes.append(node)
            continue
        source, result = node.input[0], node.output[0]
        node.input[0], node.output[0] = f"{result}_wide_in", f"{result}_wide"
        sites |= dict.fromkeys((*node.input, *node.output), sites[result])
        nodes.append(helper.make_node("Cast", [source], [node.input[0]], to=TensorProto.FLOAT))
        nodes.append(node)
        nodes.append(helper.make_node("Cast", [node.output[0]], [result], to=float_type))
    del graph.node[:]
    graph.node.extend(nodes)


def narrow_folded(graph: GraphProto) -> None:
    """Cast convolutions' weights to the type of their inputs; the exporter leaves those with folded norms float32.

    Raises BadInput for folded weights that the type can't hold.
    """
    types, stored = declared_types(graph), {tensor.name: tensor for tensor in graph.initializer}
    value_infos = {value.name: value for value in graph.value_info}
    for node in graph.node:
        float_type = BY_ONNX.get(types.get(node.input[0], 0)) if node.op_type in _CONVOLUTIONS else None
        wide = [stored[name] for name in node.input[1:] if types.get(name) == TensorProto.FLOAT and name in stored]
        if float_type not in HALVES or not wide:
            continue
        for tensor in wide:
            tensor.CopyFrom(_stored_as(tensor, float_type))
        for name in (*(tensor.name for tensor in wide), node.output[0]):
            types[name] = float_type.onnx
            if name in value_infos:
                value_infos[name].type.tensor_type.elem_type = float_type.onnx


def _stored_as(tensor: TensorProto, float_type: FloatType) -> TensorProto:
    values = numpy_helper.to_array(tensor)
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= float_type.largest:
        raise BadInput(
            f"{tensor.name}: the largest folded weight is {largest:.3g}, {float_type.name} ends at "
            f"{float_type.largest:.6g}"
        )
    return numpy_helper.from_array(values.astype(helper.tensor_dtype_to_np_dtype(float_type.onnx)), tensor.name)


def use_lowest_padding(graph: GraphProto) -> None:
    """Pad MaxPools' inputs with the least positive number instead of zeros, which ONNX Runtime would make -Inf."""
    types, stored = declared_types(graph), {tensor.name: tensor for tensor in graph.initializer}
    pooled = {node.input[0] for node in graph.node if node.op_type == "MaxPool"}
    for node in graph.node:
        if node.op_type != "Pad" or node.output[0] not in pooled:
            continue
        is_constant = all(each.s == b"constant" for each in node.attribute if each.name == "mode")
        value = node.input[2] if len(node.input) > 2 else ""
        is_zero = not value or (value in stored and not numpy_helper.to_array(stored[value]).any())
        float_type = types.get(node.input[0], 0)
        if is_constant and is_zero and float_type in _ABOVE_ZERO:
            border = helper.make_tensor(f"{node.output[0]}_border", float_type, [], [_ABOVE_ZERO[float_type]])
            graph.initializer.append(border)
            node.input[:] = [*node.input[:2], border.name, *node.input[3:]]


def merge_initializers(graph: GraphProto) -> None:
    first: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    merged: dict[str, str] = {}
    for tensor in graph.initializer:
        digest = hashlib.sha256(tensor.raw_data or tensor.SerializeToString(deterministic=True)).digest()
        merged[tensor.name] = first.setdefault((tensor.data_type, tuple(tensor.dims), digest), tensor.name)
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = merged.get(name, name)
    drop_unread(graph)


def name_by_site(graph: GraphProto, sites: Mapping[str, str], parameters: Collection[str]) -> None:
    counts: Counter[str] = Counter()
    border = {value.name for value in (*graph.input, *graph.output)}
    renamed: dict[str, str] = {}
    unnamed = {tensor.name for tensor in graph.initializer if tensor.name not in parameters}
    for node in graph.node:
        site = sites[node.output[0]]
        stem = f"{site}/{node.op_type}" if site else node.op_type
        node.name = f"{stem}_{counts[stem]}" if counts[stem] else stem
        counts[stem] += 1
        for index, name in enumerate(node.output):
            if name and name not in border:
                renamed[name] = f"{node.name}:{index}"
        for index, name in enumerate(node.input):
            if name in unnamed:
                renamed.setdefault(name, f"{node.name}.{index}")
    _rename_values(graph, renamed)


def name_ports(graph: GraphProto, names: Mapping[str, str]) -> None:
    _rename_values(graph, names)
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)


def strip_notes(model: ModelProto) -> None:
    graph = model.graph
    for holder in (model, graph, *graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output):
        del holder.metadata_props[:]
        holder.ClearField("doc_string")


def _traced_site(node: NodeProto, modules: Collection[str]) -> str | None:
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            scopes = [scope for scope in ast.literal_eval(entry.value)[:-1] if scope in modules]
            return str(scopes[-1]) if scopes else None
    return None


def _rename_values(graph: GraphProto, renamed: Mapping[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for holder in (*graph.initializer, *graph.value_info):
        holder.name = renamed.get(holder.name, holder.name)
