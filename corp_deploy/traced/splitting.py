"""A fused layer taken apart in the graph: its parts, as queries, keys and values, may become of different widths.

The layer stays one, with its weights under their names; behind it each part is taken by itself, and what arranges
elements up to there is done to each part alone.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from .call import call_of
from .flow import Flow
from .labels import TYPE, compact, tidy
from .marks import Marks
from .moves import RUN, SAME, SHAPED
from .program import Program, operation
from .resizing import narrowed, resized
from .rules import RULES

_LAYERS = {"linear": -1, "addmm": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}
_PICKING = frozenset("select slice narrow getitem".split())


def split(program: Program, uneven: Iterable[fx.Node]) -> Program | None:
    """The same program in which layers that write what is uneven are followed by their parts; None where that can't
    be: something else than moves stands between a layer and its parts.
    """
    layers = dict.fromkeys(layer for node in uneven if (layer := _layer_of(node)) is not None)
    regions = [region for region in (_Region(program, layer) for layer in layers) if region.parts]
    return _apart(program, regions) if regions else None


def _layer_of(node: fx.Node) -> fx.Node | None:
    while operation(node) not in _LAYERS:
        if not _is_move(node):
            return None
        node = node.all_input_nodes[0]
    return node


def _is_move(node: fx.Node) -> bool:
    op = operation(node)
    return op == "getitem" or (op in RUN | SAME | SHAPED and bool(node.all_input_nodes))


class _Region:
    """What arranges a layer's rows, followed with labels of its own: `parts`, each taken out of all of them."""

    def __init__(self, program: Program, layer: fx.Node) -> None:
        self.program, self.layer = program, layer
        shape = call_of(layer, {}).shape
        self.dim = _LAYERS[operation(layer)] % len(shape)
        sizes = [shape[self.dim] if dim == self.dim else 1 for dim in range(len(shape))]
        rows = torch.arange(shape[self.dim], dtype=TYPE)
        self.rows = len(rows)
        self.flow = Flow(program=program)
        self.flow.groups.add(self.rows)
        self.flow.values[layer] = Marks(shape, tidy(rows.reshape(sizes).expand(shape)))
        self.parts: dict[fx.Node, Tensor] = {}
        self._follow()

    def _follow(self) -> None:
        front = list(self.layer.users)
        for node in front:
            if not _is_move(node) or node in self.flow.values:
                continue
            for each in node.all_input_nodes:
                if each not in self.flow.values:
                    self.flow.values[each] = _size(each)
            value = RULES[operation(node)](self.flow, call_of(node, self.flow.values))
            self.flow.values[node] = value
            labels = value.labels if isinstance(value, Marks) else None
            own = None if labels is None else torch.unique(compact(labels))
            if operation(node) in _PICKING and own is not None and len(own) < self.rows:
                if len(own) == int(own[-1]) - int(own[0]) + 1:
                    self.parts[node] = own.long()
            else:
                front += node.users

    def part(self, graph: fx.Graph, nodes: dict[fx.Node, fx.Node], part: fx.Node, rows: Tensor) -> fx.Node:
        """One part, taken from the layer itself, arranged as it was among the others."""
        gone = torch.ones(self.rows, dtype=torch.bool)
        gone[rows] = False
        first, count = int(rows[0]), len(rows)
        assert int(rows[-1]) - first + 1 == count, part
        taken = _called(graph, torch.ops.aten.slice.Tensor, (nodes[self.layer], self.dim, first, first + count), part)
        own = {self.layer: taken}
        for node in self._way(part):
            own[node] = self._again(graph, nodes, own, node, gone)
        return own[part]

    def _way(self, part: fx.Node) -> list[fx.Node]:
        way = [part]
        while (before := way[-1].all_input_nodes[0]) is not self.layer:
            way.append(before)
        return way[::-1]

    def _again(
        self, graph: fx.Graph, nodes: dict[fx.Node, fx.Node], own: dict[fx.Node, fx.Node], node: fx.Node, gone: Tensor
    ) -> fx.Node:
        call = call_of(node, self.flow.values)
        if operation(node) == "getitem":
            source, number = node.args
            assert isinstance(source, fx.Node) and isinstance(number, int), node
            if operation(source) != "unbind":
                return own[source]  # a split that leaves one piece
            dim = source.args[1] if len(source.args) > 1 else 0
            return _called(graph, torch.ops.aten.select.int, (own[source.all_input_nodes[0]], dim, 0), node)
        if operation(node) in ("unbind", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk"):
            return own[node.all_input_nodes[0]]
        target, arguments = resized(call, self.flow.values[node], gone)
        narrowed(self.flow.values[node], gone)

        def said(each: Any) -> Any:
            if isinstance(each, tuple) and len(each) == 3 and isinstance(each[0], fx.Node):
                whole = _called(graph, operator.mul, (nodes[each[0]], each[1]), node)
                return _called(graph, operator.floordiv, (whole, each[2]), node)
            if isinstance(each, list | tuple):
                return [said(one) for one in each]
            return own.get(each, nodes.get(each)) if isinstance(each, fx.Node) else each

        names = [each.name for each in target._schema.arguments]  # type: ignore[attr-defined]
        return _called(graph, target, tuple(said(arguments[name]) for name in names if name in arguments), node)


def _apart(program: Program, regions: Sequence[_Region]) -> Program:
    parts = {part: (region, rows) for region in regions for part, rows in region.parts.items()}
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in program.nodes:
        if node in parts:
            region, rows = parts[node]
            nodes[node] = region.part(graph, nodes, node, rows)
        else:
            nodes[node] = graph.node_copy(node, lambda each: nodes[each])
    graph.eliminate_dead_code()
    graph.set_codegen(program.graph.graph._codegen)
    return replace(program, graph=fx.GraphModule(program.graph, graph))


def _size(node: fx.Node) -> Any:
    """A number or tensor from outside of the region."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return Marks(call_of(node, {}).shape, None, "")
    from .program import _at_one

    return _at_one(value) if value is not None else None


def _called(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """A call where another stood, with what torch says of its result."""
    node = graph.call_function(target, args)
    node.meta = {key: each for key, each in like.meta.items() if key == "nn_module_stack"}
    inside = fx.map_arg(args, lambda each: each.meta["val"])
    mode = next((each.fake_mode for each in fx.node.map_aggregate(inside, lambda each: each) if hasattr(each, "fake_mode")), None)
    if mode is None:
        node.meta["val"] = target(*inside)
    else:
        with mode:
            node.meta["val"] = target(*inside)
    return node
