"""Causal attention as products and a softmax with a constant between: an exporter's own spelling computes what no token
sees anew, and engines fuse attention with constants alone.
"""

import torch
from torch import fx

from .attention_masks import SDPA, argument
from .program import operation

HIDDEN = -30_000.0
"""Beside the scores of keys that no query sees: within half precision, and nothing behind a softmax."""
_NAME = "hidden_behind"


def spelled_out_(graph: fx.GraphModule) -> None:
    """Attentions with no other mask; those of as many queries and keys have one constant."""
    for node in list(graph.graph.nodes):
        is_causal = operation(node) == SDPA and argument(node, 5, "is_causal")
        if is_causal and argument(node, 3, "attn_mask") is None and not node.kwargs.get("enable_gqa"):
            _spell_out_(graph, node)
    graph.recompile()


def _spell_out_(graph: fx.GraphModule, node: fx.Node) -> None:
    queries, keys, values = node.all_input_nodes
    (*_, asking, width), others = queries.meta["val"].shape, keys.meta["val"].shape[-2]
    scale, name = node.kwargs.get("scale") or width**-0.5, f"{_NAME}_{asking}_{others}"
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
        scores = call_op(aten.matmul.default, call_op(aten.mul.Scalar, queries, scale), transposed_keys)
        weights = call_op(aten.softmax.int, call_op(aten.add.Tensor, scores, hidden_NN), -1, torch.float32)
        attended = call_op(aten.matmul.default, call_op(aten.to.other, weights, values), values)
    attended.meta |= node.meta
    node.replace_all_uses_with(attended)
    graph.graph.erase_node(node)
