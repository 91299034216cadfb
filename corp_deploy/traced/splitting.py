"""A fused layer taken apart in the graph: its parts, as queries, keys and values, may become of different widths.

The layer stays one, with its weights under their names; behind it each part is taken by itself, and what arranges
elements up to there is done to each part alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from .call import call_of
from .emission import Arguments, emitted, imagined
from .flow import Flow
from .labels import TYPE, compact, tidy
from .marks import Marks
from .moves import RUN, SAME, SHAPED
from .program import Program, number_of, operation
from .resizing import SPLITS, resized
from .rules import RULES

_LAYERS = {"linear": -1, "addmm": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}
_PICKING = frozenset(["select", "slice", "narrow", "getitem"])


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
                    self.flow.values[each] = number_of(each)
            value = RULES[operation(node)](self.flow, call_of(node, self.flow.values))
            self.flow.values[node] = value
            labels = value.labels if isinstance(value, Marks) else None
            own = None if labels is None else torch.unique(compact(labels))
            if operation(node) in _PICKING and own is not None and len(own) < self.rows:
                if len(own) == int(own[-1]) - int(own[0]) + 1:
                    self.parts[node] = own.long()
            else:
                front += node.users

    def part(self, graph: fx.Graph, nodes: dict[fx.Node, fx.Node], part: fx.Node) -> fx.Node:
        """One part, taken from the layer itself, arranged as it was among the others."""
        rows = self.parts[part]
        gone = torch.ones(self.rows, dtype=torch.bool)
        gone[rows] = False
        cut = {"self": self.layer, "dim": self.dim, "start": int(rows[0]), "end": int(rows[-1]) + 1}
        own = {self.layer: _said(graph, part, torch.ops.aten.slice.Tensor, cut, nodes)}
        for node in self._way(part):
            own[node] = self._again(graph, node, gone, nodes | own)
        return own[part]

    def _way(self, part: fx.Node) -> list[fx.Node]:
        way = [part]
        while (before := way[-1].all_input_nodes[0]) is not self.layer:
            way.append(before)
        return way[::-1]

    def _again(self, graph: fx.Graph, node: fx.Node, gone: Tensor, nodes: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A move of one part alone."""
        source = node.all_input_nodes[0]
        if operation(node) == "unbind" or operation(node) in SPLITS:
            return nodes[source]
        if operation(node) != "getitem":
            target, arguments = resized(call_of(node, self.flow.values), self.flow.values[node], gone)
            return _said(graph, node, target, arguments, nodes)
        if operation(source) in SPLITS:
            return nodes[source]
        call = call_of(source, self.flow.values)
        arguments = {"self": call.arguments["self"], "dim": call["dim"], "index": 0}
        return _said(graph, node, torch.ops.aten.select.int, arguments, nodes)


def _said(
    graph: fx.Graph, like: fx.Node, target: Any, arguments: Arguments, nodes: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """A call with the shape of its result."""
    new = emitted(graph, like, target, arguments, lambda each: nodes[each])
    for each in (*new.all_input_nodes, new):
        if "val" not in each.meta:
            imagined(each)
    return new


def _apart(program: Program, regions: Sequence[_Region]) -> Program:
    parts = {part: region for region in regions for part in region.parts}
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in program.nodes:
        is_part = node in parts
        nodes[node] = (
            parts[node].part(graph, nodes, node) if is_part else graph.node_copy(node, lambda each: nodes[each])
        )
    graph.eliminate_dead_code()
    graph.set_codegen(copy(program.graph.graph._codegen))
    return replace(program, graph=fx.GraphModule(program.graph, graph))
