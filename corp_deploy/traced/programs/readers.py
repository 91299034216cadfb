"""Linear layers and convolutions of a program: added biases, hookable modules, new weights; and vocabulary sizes.

Legend: I inputs, O outputs.
"""

from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from .program import (
    IN_FRONT,
    RUN,
    SAME,
    SHAPED,
    BatchAxis,
    Program,
    batch_axis_of,
    constant_names,
    delete_tensor_,
    named_arguments,
    operation,
    set_tensor_,
)


def vocabulary_sizes(program: Program) -> dict[str, int]:
    """Return, by name of an input, the number of rows of the smallest embedding table that its ids are looked up in."""
    rows: dict[str, int] = {}
    for node in program.nodes:
        if operation(node) != "embedding":
            continue
        table, source = node.args[:2]
        assert isinstance(table, fx.Node), node
        while isinstance(source, fx.Node) and operation(source) in SAME | SHAPED | RUN:
            source = source.args[0]
        value = table.meta.get("val")
        if isinstance(source, fx.Node) and source.op == "placeholder" and isinstance(value, Tensor):
            rows[str(source.target)] = min(len(value), rows.get(str(source.target), len(value)))
    return rows


LINEAR, CONV2D = torch.ops.aten.linear.default, torch.ops.aten.conv2d.default
BATCH_NORM = torch.ops.aten.batch_norm.default
Layer = nn.Linear | nn.Conv2d


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledLayer:
    """A node that calls a linear layer or convolution; names of its weight [O,I] or [O,I,H,W] and of its bias or ''."""

    node: fx.Node
    weight: str
    bias: str

    @property
    def name(self) -> str:
        """The name of the module that owns the weight."""
        return self.weight.removesuffix(".weight")


def every_layer(program: Program) -> Iterator[CalledLayer]:
    """Yield the linear layers and 2D convolutions whose weight and bias are parameters or constants, in order."""
    for node in program.nodes:
        if node.target in (LINEAR, CONV2D):
            arguments = named_arguments(node)
            weight, bias = arguments["weight"], arguments["bias"]
            if weight.op == "get_attr" and (bias is None or bias.op == "get_attr"):
                yield CalledLayer(
                    node=node, weight=str(weight.target), bias=str(bias.target) if bias is not None else ""
                )


def layers(program: Program, *, in_groups: bool = False) -> Iterator[CalledLayer]:
    """Yield the layers that sum over all channels; with `in_groups` also grouped convolutions but depthwise ones."""
    for layer in every_layer(program):
        if group_count(layer.node) == 1 or (in_groups and program.tensor(layer.weight).shape[1] > 1):
            yield layer


def group_count(node: fx.Node) -> int:
    return int(named_arguments(node).get("groups", 1))


def batch_norm_gain(program: Program, node: fx.Node) -> Tensor | None:
    """Return the batch norm's factors [O], float64, of a layer's outputs; None unless it alone uses these."""
    norm = next(iter(node.users)) if len(node.users) == 1 else node
    if norm.target is not BATCH_NORM:
        return None
    arguments = named_arguments(norm)
    gain_O: Tensor = (program.tensor(str(arguments["running_var"].target)).double() + arguments["eps"]).rsqrt()
    weight = arguments["weight"]
    return gain_O if weight is None else program.tensor(str(weight.target)).detach().double() * gain_O


def weight_with_gain(program: Program, name: str) -> Tensor:
    """Return a weight in float64, its rows scaled by the batch norm after its layer, if one layer alone has it."""
    weight = program.tensor(name).detach().double()
    calls = [layer.node for layer in every_layer(program) if layer.weight == name]
    gain_O = batch_norm_gain(program, calls[0]) if len(calls) == 1 else None
    return scale_rows(weight, gain_O)


def scale_rows(weight: Tensor, gain_O: Tensor | None) -> Tensor:
    return weight if gain_O is None else weight * gain_O.to(weight.device).view(-1, *[1] * (weight.dim() - 1))


def add_zero_biases_(program: Program) -> tuple[str, ...]:
    """Give every layer without a bias one of zeros for repairs to change; return the names of these biases."""
    graph, added = program.graph, dict[str, None]()
    names = constant_names(program.nodes)
    for layer in list(every_layer(program)):
        if layer.bias:
            continue
        # A weight whose name doesn't end in .weight, such as a folded constant, gets a bias named after it.
        stem = f"{layer.name}." if layer.name != layer.weight else f"{layer.weight}_"
        name = f"{stem}bias" if f"{stem}bias" not in names else f"{stem}added_bias"
        if name not in added:
            weight = program.tensor(layer.weight)
            set_tensor_(graph, name, nn.Parameter(weight.new_zeros(len(weight)), requires_grad=False))
            added[name] = None
        with graph.graph.inserting_before(layer.node):
            bias = graph.graph.get_attr(name)
        value = program.tensor(name)
        bias.meta = {**layer.node.meta, "val": value, "sizes": tuple(value.shape)}
        layer.node.args = (*layer.node.args[:2], bias, *layer.node.args[3:])
        layer.node.kwargs = {key: each for key, each in layer.node.kwargs.items() if key != "bias"}
    if added:
        graph.recompile()
    return tuple(added)


def remove_biases_(graph: fx.GraphModule, names: Collection[str]) -> None:
    if not names:
        return
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and str(node.target) in names:
            for user in list(node.users):
                user.update_arg(2, None)
            graph.graph.erase_node(node)
    for name in names:
        delete_tensor_(graph, name)
    graph.recompile()


class BatchFirst(nn.Module):
    """A layer whose hooks see the images on the first axis, whatever the program's batch axis is.

    `is_read`: a mask of one image's rows [...]; the layer runs on these rows alone and gives zeros for the others.
    """

    is_read: Tensor | None

    def __init__(self, layer: Layer, batch: BatchAxis, is_read: Tensor | None) -> None:
        super().__init__()
        self.layer, self.batch = layer, batch
        self.register_buffer("is_read", None if is_read is None else batch.in_front(is_read).flatten())

    def forward(self, x: Tensor) -> Tensor:
        front = self.batch.in_front(x)
        if self.is_read is None:
            return self.batch.back(self.layer(front))
        rows = front.flatten(1, -2)
        outputs = rows.new_zeros(*rows.shape[:2], self.layer.weight.shape[0])
        outputs[:, self.is_read] = self.layer(rows[:, self.is_read])
        return self.batch.back(outputs.view(*front.shape[:-1], -1))


def build_listening_graph(
    program: Program, hooked: Collection[str], tapped: Collection[str], read: Mapping[str, Tensor]
) -> tuple[fx.GraphModule, dict[str, Layer], dict[str, nn.Module]]:
    """Build a graph to hook that shares the program's tensors; return it, and by node name its layers and its taps.

    The nodes `hooked` become calls of layer modules; the nodes `tapped` are followed by identity modules, the taps.
    `read`: masks of the rows that are read, by hooked node, for nodes of which some rows aren't.
    """
    called = layers(program, in_groups=True)
    modules = {layer.node.name: layer_as_module(program, layer) for layer in called if layer.node.name in hooked}
    taps: dict[str, nn.Module] = {name: nn.Identity() for name in tapped}
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    root: dict[str, Any] = {f"given.of_{name}": module for name, module in taps.items()}
    for node in program.nodes:
        if node.name in modules:
            entering, name, layer = node.all_input_nodes[0], f"listened.{node.name}", modules[node.name]
            batch, is_read = batch_axis_of(entering), read.get(node.name)
            assert batch is not None, node
            root[name] = layer if batch == IN_FRONT and is_read is None else BatchFirst(layer, batch, is_read)
            nodes[node] = graph.call_module(name, (nodes[entering],))
        else:
            nodes[node] = graph.node_copy(node, lambda each: nodes[each])
        if node.name in taps:
            nodes[node] = graph.call_module(f"given.of_{node.name}", (nodes[node],))
    for node in [each for each in graph.nodes if each.op == "get_attr" and not each.users]:
        graph.erase_node(node)
    graph.set_codegen(copy(program.graph.graph._codegen))
    root |= {name: program.tensor(name) for name in constant_names(graph.nodes)}
    root |= {
        str(each.target): program.graph.get_submodule(str(each.target))
        for each in program.nodes
        if each.op == "call_module"
    }
    return fx.GraphModule(root, graph).eval(), modules, taps


def can_be_observed(reader: fx.Node, source: fx.Node) -> bool:
    """Check that the batch axis of a layer's input is known and, unless the layer is linear, counts images alone."""
    batch = batch_axis_of(source)
    return batch is not None and (reader.target is LINEAR or batch.outer * batch.inner == 1)


def layer_as_module(program: Program, layer: CalledLayer) -> Layer:
    """Return a layer as an nn.Linear or nn.Conv2d that shares its weights with the program."""
    weight, bias = program.tensor(layer.weight), program.tensor(layer.bias) if layer.bias else None
    rows, columns = weight.shape[:2]
    module: Layer
    if layer.node.target is LINEAR:
        module = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    else:
        arguments, groups = named_arguments(layer.node), group_count(layer.node)
        # A list of one number holds for both axes of a map.
        how = {name: (arguments[name][0], arguments[name][-1]) for name in ("stride", "padding", "dilation")}
        size = (weight.shape[2], weight.shape[3])
        module = nn.Conv2d(columns * groups, rows, size, groups=groups, bias=bias is not None, device="meta", **how)  # type: ignore[arg-type]
    module.weight = _parameter(weight)
    module.bias = None if bias is None else _parameter(bias)
    return module


def _parameter(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def replace_tensors(program: Program, tensors: Mapping[str, Tensor]) -> Program:
    """Return a program with new tensors by name, other names ignored; both programs share one graph."""
    graph = program.graph.graph
    root: dict[str, Any] = {name: program.tensor(name) for name in constant_names(graph.nodes)}
    root |= {name: _parameter(each) for name, each in tensors.items() if name in root}
    owner = graph.owning_module
    changed = fx.GraphModule(root, graph)
    graph.owning_module = owner
    return replace(program, graph=changed)
