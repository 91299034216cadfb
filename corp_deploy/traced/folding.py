"""What depends on no input, as standardised weights and tables of positions: computed once, then a constant."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn


def fold_(graph: fx.GraphModule) -> tuple[str, ...]:
    """Put constants in the place of all that is computed from parameters and numbers alone; their names.

    A constant has the name of the one parameter of its shape that it was computed from, so that a standardised weight
    is still the weight; else one of its own, beside its first parameter.
    """
    before = _used(graph.graph)
    free = _independent(graph.graph)
    ends = [node for node in free if node.op != "get_attr" and any(user not in free for user in node.users)]
    ends = [node for node in ends if isinstance(node.meta.get("val"), Tensor) and not _is_filled(node)]
    values = _computed(graph, ends, free)
    names: list[str] = []
    for node in ends:
        name = _name(graph, node, free, set(names))
        _put(graph, name, values[node])
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        names.append(name)
    graph.graph.eliminate_dead_code()
    _drop_(graph, before - _used(graph.graph))
    graph.recompile()
    return tuple(names)


def _independent(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes that no input reaches."""
    free: dict[fx.Node, None] = {}
    for node in graph.nodes:
        is_call = node.op == "call_function" and all(each in free for each in node.all_input_nodes)
        if node.op == "get_attr" or is_call:
            free[node] = None
    return free


def _is_filled(node: fx.Node) -> bool:
    """One number everywhere stays as it is said: it has no elements of its own."""
    return not node.all_input_nodes and "full" in str(node.target)


def _computed(graph: fx.GraphModule, ends: list[fx.Node], free: Mapping[fx.Node, None]) -> dict[fx.Node, Tensor]:
    """What the ends are, of all that they need."""
    needed, front = set(ends), list(ends)
    while front:
        for node in front.pop().all_input_nodes:
            if node not in needed:
                needed.add(node)
                front.append(node)
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in free:
            if node in needed:
                values[node] = _value(graph, node, values)
    return {node: values[node].detach().clone(memory_format=torch.contiguous_format) for node in ends}


def _value(graph: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        owner, _, last = str(node.target).rpartition(".")
        return getattr(graph.get_submodule(owner), last)
    assert callable(node.target), node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: values[each])
    return node.target(*args, **kwargs)


def _name(graph: fx.GraphModule, node: fx.Node, free: Mapping[fx.Node, None], taken: set[str]) -> str:
    sources = _sources(node)
    alike = [
        each for each in sources if each.meta["val"].shape == node.meta["val"].shape and _only_for(each, node, free)
    ]
    if alike and str(alike[0].target) not in taken:
        return str(alike[0].target)
    beside = str(sources[0].target) if sources else "constant"
    name = f"{beside}_folded"
    count = sum(each == name or each.startswith(f"{name}_") for each in taken)
    return f"{name}_{count}" if count else name


def _sources(node: fx.Node) -> list[fx.Node]:
    """The parameters that a node is computed from, the nearest first."""
    front, seen = [node], {node: None}
    for each in front:
        new = [source for source in each.all_input_nodes if source not in seen]
        seen.update(dict.fromkeys(new))
        front += new
    return [each for each in seen if each.op == "get_attr"]


def _only_for(source: fx.Node, node: fx.Node, free: Mapping[fx.Node, None]) -> bool:
    """Whether all that a parameter is used for ends in one node."""
    front, seen = [source], set()
    while front:
        for user in front.pop().users:
            if user is node or user in seen:
                continue
            if user not in free:
                return False
            seen.add(user)
            front.append(user)
    return isinstance(source.meta["val"], nn.Parameter) or source.meta["val"].is_floating_point()


def _put(graph: fx.GraphModule, name: str, value: Tensor) -> None:
    owner = graph
    *path, last = name.split(".")
    for part in path:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    if last in owner._parameters:
        owner._parameters[last] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers.pop(last, None)
        owner.__dict__.pop(last, None)
        owner.register_buffer(last, value)


def _used(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "get_attr"}


def _drop_(graph: fx.GraphModule, names: set[str]) -> None:
    """Parameters that only served what is folded now."""
    for name in names:
        owner, _, last = name.rpartition(".")
        delattr(graph.get_submodule(owner), last)
