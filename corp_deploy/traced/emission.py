"""Calls written into another graph, with arguments of their own."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True, slots=True)
class Scaled:
    """A size that counts the batch too: `count` of the dense program, `new` for every `old` of it."""

    count: fx.Node
    new: int
    old: int


Arguments = dict[str, Any]


def with_nodes(argument: Any, of_node: Callable[[fx.Node], Any], of_scaled: Callable[[Scaled], Any]) -> Any:
    """An argument with something else in the place of nodes and of sizes that count the batch."""
    if isinstance(argument, list | tuple):
        return [with_nodes(each, of_node, of_scaled) for each in argument]
    if isinstance(argument, Scaled):
        return of_scaled(argument)
    return of_node(argument) if isinstance(argument, fx.Node) else argument


def emitted(
    graph: fx.Graph, like: fx.Node, target: Any, arguments: Arguments, of_node: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """A call in the place of another, its arguments by the names of the op's schema."""

    def scaled(size: Scaled) -> fx.Node:
        whole = _called(graph, like, operator.mul, (of_node(size.count), size.new), {})
        return _called(graph, like, operator.floordiv, (whole, size.old), {})

    said = {name: with_nodes(each, of_node, scaled) for name, each in arguments.items()}
    schema = [each for each in target._schema.arguments if each.name in said]
    args = tuple(said[each.name] for each in schema if not each.kwarg_only)
    return _called(graph, like, target, args, {each.name: said[each.name] for each in schema if each.kwarg_only})


def _called(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Arguments) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: each for key, each in like.meta.items() if key in KEPT}
    return node


KEPT = ("nn_module_stack", "source_fn_stack")
"""What a node tells of the module that it was called in."""


def bare(node: fx.Node) -> fx.Node:
    """Without the dense program's tensors."""
    node.meta = {key: each for key, each in node.meta.items() if key in KEPT}
    return node


def imagined(node: fx.Node) -> fx.Node:
    """With the shape of its result, as torch says it of the shapes that enter."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    tensors = [each.meta["val"] for each in node.all_input_nodes if isinstance(each.meta["val"], Tensor)]
    assert callable(node.target), node
    if not tensors:
        node.meta["val"] = node.target(*args, **kwargs)
        return node
    imagining: Any = tensors[0]
    with imagining.fake_mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)
    return node
