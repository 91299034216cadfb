"""Queries and keys beside values of another width: the narrower of them with zeros behind, which changes no result and
lets engines keep their one kernel of an attention.
"""

from collections.abc import Iterator
from copy import copy

import torch
from torch import fx

from .attention_masks import SDPA, values_product
from .program import Program, operation, sizes_at_one

Pads = dict[int, list[int]]
"""By the place of an argument the zeros that go beside it, as `pad` takes them."""


def padded(program: Program) -> fx.GraphModule:
    """The same program; an attention of which nothing says what its scores are scaled by stays as it is."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    pads = {node: each for owner in program.nodes for node, each in _pads(owner)}
    for node in program.nodes:
        new = nodes[node] = graph.node_copy(node, lambda each: nodes[each])
        for place, zeros in pads.get(node, {}).items():
            with graph.inserting_before(new):
                wider = graph.call_function(torch.ops.aten.pad.default, (new.args[place], zeros))
            wider.meta["val"] = torch.ops.aten.pad.default(wider.all_input_nodes[0].meta["val"], zeros)
            new.update_arg(place, wider)
        if node in pads and _values_place(node) in pads[node]:
            width = sizes_at_one(node)[-1]
            nodes[node] = graph.call_function(torch.ops.aten.slice.Tensor, (new, -1, 0, width))
            nodes[node].meta["val"] = node.meta["val"]
    graph.set_codegen(copy(program.graph.graph._codegen))
    return fx.GraphModule(program.graph, graph)


def has_uneven(program: Program) -> bool:
    """Whether queries and keys are of another width than values in any attention that can be padded."""
    return any(pads for owner in program.nodes for pads in _pads(owner))


def _values_place(node: fx.Node) -> int:
    return 2 if operation(node) == SDPA else 1


def _pads(scores: fx.Node) -> Iterator[tuple[fx.Node, Pads]]:
    """Where a node multiplies queries by keys: what is put beside those, or beside the values that are summed up."""
    is_whole, node = operation(scores) == SDPA, values_product(scores)
    if node is None or (is_whole and scores.kwargs.get("scale") is None):
        return
    queries, values = (sizes_at_one(each)[-1] for each in (scores.args[0], node.args[_values_place(node)]))  # type: ignore[arg-type]
    if queries < values:
        beside = [0, values - queries]
        yield scores, {0: beside, 1: beside if is_whole else [0, 0, *beside]}
    elif values < queries:
        yield node, {_values_place(node): [0, queries - values]}
