"""Fusion breaks: values that a graph also gives as float32 outputs, which keeps builders from fusing across them.

They are named `fusion_break.SITE`, by which runners and servers know them (ground.ports) and drop them.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from ground.errors import BadInput
from ground.ports import FUSION_BREAK

from .ports import dims_of_value, graph_inputs, has_fixed_sizes
from .weights import module_of_node

NOTE = "export.fusion_breaks"
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def with_fusion_breaks(proto: ModelProto, patterns: Sequence[str]) -> ModelProto:
    """Return a copy in which all values that patterns name are outputs, too; without patterns the graph itself.

    A pattern names modules (`blocks.7.attn`, `blocks.*.mlp`), whose last value is meant, or, with a slash, nodes
    (`blocks.7.attn/Softmax`). Raises BadInput for patterns that fit nothing, and for values without a batch in front or
    with open sizes.
    """
    if not patterns:
        return proto
    values, marked = _typed_values(proto), _values_by_site(proto, patterns)
    copy = ModelProto()
    copy.CopyFrom(proto)
    for site, name in marked.items():
        value = values.get(name)
        reason = _unfit_reason(copy, value)
        if value is None or reason is not None:
            raise BadInput(f"fusion break {site!r}: {reason}")
        node = helper.make_node("Cast", [name], [FUSION_BREAK + site], name=FUSION_BREAK + site, to=TensorProto.FLOAT)
        copy.graph.node.append(node)
        output = copy.graph.output.add()
        output.CopyFrom(value)
        output.name = FUSION_BREAK + site
        output.type.tensor_type.elem_type = TensorProto.FLOAT
    copy.metadata_props.add(key=NOTE, value=" ".join(marked))
    return copy


def breakable_sites(proto: ModelProto, sites: Sequence[str]) -> tuple[str, ...]:
    values = _typed_values(proto)
    return tuple(
        site for site, name in _values_by_site(proto, sites).items() if _unfit_reason(proto, values.get(name)) is None
    )


def _typed_values(proto: ModelProto) -> dict[str, ValueInfoProto]:
    typed = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    return {value.name: value for value in typed.graph.value_info}


def modules_of_graph(proto: ModelProto) -> tuple[str, ...]:
    paths = dict.fromkeys(map(module_of_node, proto.graph.node))
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        found |= dict.fromkeys(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return tuple(name for name in found if name)


def _values_by_site(proto: ModelProto, patterns: Sequence[str]) -> dict[str, str]:
    nodes = {node.name: node.output[0] for node in proto.graph.node if "/" in node.name}
    modules = modules_of_graph(proto)
    marked: dict[str, str] = {}
    for pattern in patterns:
        names = [name for name in (nodes if "/" in pattern else modules) if fnmatchcase(name, pattern)]
        fitting = {name: nodes[name] if "/" in pattern else _last_value(proto, name) for name in names}
        ending = {value.name for value in proto.graph.output}
        inside = {name: value for name, value in fitting.items() if value is not None and value not in ending}
        if not inside:
            why = f"the value of {names[0]} is an output already" if names else "fits no module and no node"
            # Suggest modules right below a numbered block, such as blocks.7.attn.
            below = [name for name in modules if len(name.split(".")) > 1 and name.split(".")[-2].isdigit()]
            shown = ", ".join((below or list(modules))[:4])
            node = next((str(node.name) for node in proto.graph.node if node.op_type == "Softmax"), "norm/Add")
            raise BadInput(
                f"fusion break {pattern!r}: {why}; name a module, such as {shown}, or a node, such as {node}"
            )
        marked |= inside
    places = {name: place for place, node in enumerate(proto.graph.node) for name in node.output}
    first = {value: site for site, value in reversed(marked.items())}  # one value is marked once
    return {site: value for value, site in sorted(first.items(), key=lambda each: places[each[0]])}


def _last_value(proto: ModelProto, module: str) -> str | None:
    inside = [node for node in proto.graph.node if f"{module_of_node(node)}.".startswith(f"{module}.")]
    names = {node.name for node in inside}
    read = {name for node in proto.graph.node if node.name not in names for name in node.input}
    read |= {value.name for value in proto.graph.output}
    leaving = [name for node in inside for name in node.output if name in read]
    return leaving[-1] if leaving else None


def _unfit_reason(proto: ModelProto, value: ValueInfoProto | None) -> str | None:
    if value is None or value.type.tensor_type.elem_type not in _FLOATS:
        return "its value is no float tensor of a known shape; name another module or node"
    dims = dims_of_value(value)
    if has_fixed_sizes(dims) and dims[0] == dims_of_value(graph_inputs(proto)[0])[0]:
        return None
    return f"it gives {dims}, expected a batch in front and fixed sizes behind it; name the block around it"
