"""What depends on no input, as standardised weights and tables of positions: computed once, then a constant."""

from collections.abc import Collection

import torch
from torch import Tensor, fx

from .program import operation, reached, set_tensor_, settle_

NUMBERS = "numbers_folded"
"""What constants are called that were computed from no parameter: nothing that is learned changes them."""


def fold_(graph: fx.GraphModule) -> tuple[str, ...]:
    """Put constants in the place of all that is computed from parameters and numbers alone; their names.

    A constant has the name of the one parameter of its shape that it was computed from, so that a standardised weight
    is still the weight; else one of its own, beside its first parameter.
    """
    names, run = list[str](), fx.Interpreter(graph)
    values = run.env
    for node in graph.graph.nodes:
        is_computed = node.op == "call_function" and all(each in values for each in node.all_input_nodes)
        if node.op == "get_attr" or is_computed:
            with torch.no_grad():
                values[node] = run.run_node(node)
    for node in [node for node in values if _is_folded(node, values)]:
        names.append(_name(node, values, names))
        set_tensor_(graph, names[-1], values[node].detach().clone(memory_format=torch.contiguous_format))
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(names[-1])
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
    settle_(graph)
    return tuple(names)


def _is_folded(node: fx.Node, free: Collection[fx.Node]) -> bool:
    """A tensor that what depends on inputs takes; one number everywhere, random ones and rows of a table stay."""
    is_range = any(name in str(node.target) for name in ("arange", "linspace", "eye"))
    is_taken = node.op != "get_attr" and not _is_of_rows(node) and any(user not in free for user in node.users)
    return is_taken and isinstance(node.meta.get("val"), Tensor) and (bool(node.all_input_nodes) or is_range)


def _is_of_rows(node: fx.Node) -> bool:
    """Whether rows of a whole table [T,C] are all that it gives."""
    if operation(node) not in ("slice", "select") or node.args[1] != 0:
        return False
    (table,) = node.all_input_nodes
    return table.op == "get_attr" and table.meta["val"].dim() == 2


def _name(node: fx.Node, free: Collection[fx.Node], used: Collection[str]) -> str:
    """Of the nearest parameter of its shape that is for nothing else; else of the nearest."""
    sources = [each for each in reached([node]) if each.op == "get_attr"]
    for each in sources:
        is_same = each.meta["val"].shape == node.meta["val"].shape and str(each.target) not in used
        if is_same and _is_only_for(each, node, free):
            return str(each.target)
    name = f"{sources[0].target}_folded" if sources else NUMBERS
    count = sum(each == name or each.startswith(f"{name}_") for each in used)
    return f"{name}_{count}" if count else name


def _is_only_for(source: fx.Node, node: fx.Node, free: Collection[fx.Node]) -> bool:
    """Whether all that a parameter is used for ends in one node."""
    ways = reached([source], lambda each: [user for user in each.users if user is not node])
    return all(each in free for each in ways) and bool(source.meta["val"].is_floating_point())
