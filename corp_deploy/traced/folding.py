"""What depends on no input, as standardised weights and tables of positions: computed once, then a constant."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn


def fold_(graph: fx.GraphModule) -> tuple[str, ...]:
    """Put constants in the place of all that is computed from parameters and numbers alone; their names.

    A constant has the name of the one parameter of its shape that it was computed from, so that a standardised weight
    is still the weight; else one of its own, beside its first parameter.
    """
    before = _used(graph)
    free = _independent(graph.graph)
    ends = [node for node in free if node.op != "get_attr" and any(user not in free for user in node.users)]
    ends = [
        node for node in ends if isinstance(node.meta.get("val"), Tensor) and (node.all_input_nodes or _is_range(node))
    ]
    values = _computed(graph, ends, free)
    names: list[str] = []
    for node in ends:
        names.append(_name(node, _sources(node), free, names))
        _put(graph, names[-1], values[node].detach().clone(memory_format=torch.contiguous_format))
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(names[-1])
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
    graph.graph.eliminate_dead_code()
    for name in before - _used(graph):
        owner, _, last = name.rpartition(".")
        delattr(graph.get_submodule(owner), last)
    graph.recompile()
    return tuple(names)


def _used(graph: fx.GraphModule) -> set[str]:
    return {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}


def _independent(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes that no input reaches."""
    free: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and all(each in free for each in node.all_input_nodes)):
            free[node] = None
    return free


def _is_range(node: fx.Node) -> bool:
    """One number everywhere, or random ones, stay as they are said."""
    return any(name in str(node.target) for name in ("arange", "linspace", "eye"))


def _computed(graph: fx.GraphModule, ends: list[fx.Node], free: Iterable[fx.Node]) -> dict[fx.Node, Any]:
    """What the ends are, and all that they need."""
    needed, front = set(ends), list(ends)
    for node in front:
        front += [each for each in node.all_input_nodes if each not in needed]
        needed.update(node.all_input_nodes)
    values = fx.Interpreter(graph)
    with torch.no_grad():
        for node in free:
            if node in needed:
                values.env[node] = values.run_node(node)
    return values.env


def _sources(node: fx.Node) -> list[fx.Node]:
    """The parameters that a node is computed from, the nearest first."""
    seen = {node: None}
    for each in (front := [node]):
        front += [source for source in each.all_input_nodes if source not in seen]
        seen |= dict.fromkeys(each.all_input_nodes)
    return [each for each in seen if each.op == "get_attr"]


def _name(node: fx.Node, sources: list[fx.Node], free: dict[fx.Node, None], taken: list[str]) -> str:
    shape = node.meta["val"].shape
    for each in sources:
        if each.meta["val"].shape == shape and _is_only_for(each, node, free) and str(each.target) not in taken:
            return str(each.target)
    name = f"{sources[0].target if sources else 'numbers'}_folded"
    count = sum(each == name or each.startswith(f"{name}_") for each in taken)
    return f"{name}_{count}" if count else name


def _is_only_for(source: fx.Node, node: fx.Node, free: dict[fx.Node, None]) -> bool:
    """Whether all that a parameter is used for ends in one node."""
    front = [source]
    for each in front:
        users = [user for user in each.users if user is not node and user not in front]
        if any(user not in free for user in users):
            return False
        front += users
    return bool(source.meta["val"].is_floating_point())


def _put(graph: fx.GraphModule, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = graph.get_submodule(path)
    if last in owner._parameters:
        owner._parameters[last] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers.pop(last, None)
        owner.register_buffer(last, value)
