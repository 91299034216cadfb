"""A program that runs in any floating type: what it computes in float32 of itself meets weights in their type.

Traced, a `.float()`, a division of whole numbers or a type that was read off a weight is float32 for good, and no
product takes two types. The least number of a type, which masks are made of, is float32's, infinite in half precision.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, ops

from .program import operation

_PRODUCTS = (
    "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "convolution", "einsum", "gru", "linear", "lstm", "matmul",
    "mm", "rnn_relu", "rnn_tanh", "scaled_dot_product_attention",
)  # fmt: skip
_FLOAT, _HALF = torch.finfo(torch.float32), torch.finfo(torch.float16)
_ENDS = {_FLOAT.min: _HALF.min, _FLOAT.max: _HALF.max}


def with_one_type_(graph: fx.GraphModule) -> None:
    """What enters a product is brought to the type of its weight, or else of the last weight before it."""
    others = [node for node in graph.graph.nodes if not operation(node).startswith("clamp")]  # to the end is not at all
    _change_arguments_(others, lambda each: _ENDS.get(each, each) if isinstance(each, float) else each)
    weight: fx.Node | None = None
    for node in list(graph.graph.nodes):
        if operation(node) not in _PRODUCTS:
            continue
        weight = next((each for each in node.all_input_nodes if _is_floating(each, "get_attr")), weight)
        for entering in node.all_input_nodes if weight is not None else ():
            if _is_floating(entering, "call_function"):
                with graph.graph.inserting_before(node):
                    cast = graph.graph.call_function(ops.aten.to.other, (entering, weight))
                node.replace_input_with(entering, cast)
    graph.recompile()


def _is_floating(node: fx.Node, kind: str) -> bool:
    value = node.meta.get("val")
    return node.op == kind and isinstance(value, Tensor) and value.is_floating_point()


def made_on_(graph: fx.GraphModule, place: torch.device) -> None:
    """Where a program makes tensors itself, of a batch's size say, it makes them there."""
    _change_arguments_(graph.graph.nodes, lambda each: place if isinstance(each, torch.device) else each)
    graph.recompile()


def _change_arguments_(nodes: Iterable[Any], change: Callable[[Any], Any]) -> None:
    for node in nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(each, change) for each in (node.args, node.kwargs))
