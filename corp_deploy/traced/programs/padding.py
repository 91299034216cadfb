"""Queries and keys beside values of another width: the narrower of them with zeros behind, which changes no result and
lets engines keep their one kernel of an attention.
"""

from collections.abc import Iterator
from copy import copy

import torch
from torch import fx

from .program import Program, operation, sizes_at_one

_PRODUCTS = frozenset(("matmul", "bmm"))
_BETWEEN = frozenset(("softmax", "_softmax", "add", "mul", "div", "dropout", "to", "_to_copy", "masked_fill"))
"""What stands between the two products of an attention."""
Pads = dict[int, list[int]]
"""By the place of an argument the zeros that go beside it, as `pad` takes them."""


def padded(program: Program) -> fx.GraphModule:
    """The same program; an attention of which nothing says what its scores are scaled by stays as it is."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    pads = {node: each for whole in program.nodes for node, each in _pads(whole)}
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


def _values_place(node: fx.Node) -> int:
    return 2 if operation(node) == "scaled_dot_product_attention" else 1


def _pads(node: fx.Node) -> Iterator[tuple[fx.Node, Pads]]:
    """Where a node sums up values: what is put beside those, or beside queries and keys at their product."""
    op, is_whole = operation(node), operation(node) == "scaled_dot_product_attention"
    scores = node if is_whole and node.kwargs.get("scale") is not None else _scores(node) if op in _PRODUCTS else None
    if scores is None:
        return
    queries, values = (sizes_at_one(each)[-1] for each in (scores.args[0], node.args[_values_place(node)]))  # type: ignore[arg-type]
    if queries < values:
        beside = [0, values - queries]
        yield scores, {0: beside, 1: beside if is_whole else [0, 0, *beside]}
    elif values < queries:
        yield node, {_values_place(node): [0, queries - values]}


def _scores(node: fx.Node) -> fx.Node | None:
    """The product of queries and keys whose softmax weighs what a product sums up."""
    of_softmax, at = False, node.args[0]
    while isinstance(at, fx.Node) and operation(at) in _BETWEEN:
        of_softmax |= operation(at) in ("softmax", "_softmax")
        at = at.args[0]
    return at if of_softmax and isinstance(at, fx.Node) and operation(at) in _PRODUCTS else None
