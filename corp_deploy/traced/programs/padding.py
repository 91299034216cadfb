"""Attentions as engines fuse them: a causal one as products and a softmax with a constant between, since an exporter's
own spelling computes what no token sees anew; and queries and keys beside values of another width with zeros behind,
which changes no result.
"""

from collections.abc import Iterator
from copy import copy

import torch
from torch import fx

from .attention_masks import SDPA, scale_of, values_product
from .program import Program, arguments_of, operation, sizes_at_one

HIDDEN = -30_000.0
"""Beside the scores of keys that no query sees: within half precision, and nothing behind a softmax."""
_NAME = "hidden_behind"


def spelled_out_(graph: fx.GraphModule) -> None:
    """Attentions with no other mask; those of as many queries and keys have one constant."""
    for node in list(graph.graph.nodes):
        arguments = arguments_of(node) if operation(node) == SDPA else {"is_causal": False}
        if arguments["is_causal"] and arguments["attn_mask"] is None and not arguments["enable_gqa"]:
            _spell_out_(graph, node)
    graph.recompile()


def _spell_out_(graph: fx.GraphModule, node: fx.Node) -> None:
    queries, keys, values = node.all_input_nodes
    asking, others = queries.meta["val"].shape[-2], keys.meta["val"].shape[-2]
    name = f"{_NAME}_{asking}_{others}"
    if name not in dict(graph.named_buffers()):
        graph.register_buffer(name, torch.full((asking, others), HIDDEN).triu(1))
    aten, stack = torch.ops.aten, node.meta.get("nn_module_stack", {})

    def call_op(target: object, *args: object) -> fx.Node:
        new = graph.graph.create_node("call_function", target, args)  # type: ignore[arg-type]
        new.meta["nn_module_stack"] = stack
        return new

    with graph.graph.inserting_before(node):
        hidden_NN = graph.graph.get_attr(name)
        transposed_keys = call_op(aten.transpose.int, keys, -2, -1)
        scores = call_op(aten.matmul.default, call_op(aten.mul.Scalar, queries, scale_of(node)), transposed_keys)
        weights = call_op(aten.softmax.int, call_op(aten.add.Tensor, scores, hidden_NN), -1, torch.float32)
        attended = call_op(aten.matmul.default, call_op(aten.to.other, weights, values), values)
    attended.meta |= node.meta
    node.replace_all_uses_with(attended)
    graph.graph.erase_node(node)


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
