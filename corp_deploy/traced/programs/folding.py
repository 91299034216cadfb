"""Constant folding in a newly traced program, and replacement of means over channels by linear layers.

A global response norm divides each channel by a mean over channels (arXiv 2301.00808, section 3). As a linear layer of
equal weights, this mean can be refitted after channels are removed: the remaining channels estimate the mean of all.
"""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, fx

from .program import SAME, find_reachable, module_of, operation, remove_unused_, set_tensor_

NUMBERS = "numbers_folded"
"""The first part of the names of constants that depend on no parameter."""


def fold_constants_(graph: fx.GraphModule) -> tuple[str, ...]:
    """Replace values that depend on parameters and numbers alone by constants, and return the constants' names.

    A constant takes the name of a parameter of its shape that nothing else uses, so that a standardised weight keeps
    the weight's name; else the name of the first parameter it depends on, with a suffix.
    """
    names, run = list[str](), fx.Interpreter(graph)
    values = run.env
    for node in graph.graph.nodes:
        is_computed = node.op == "call_function" and all(each in values for each in node.all_input_nodes)
        if node.op == "get_attr" or is_computed:
            with torch.no_grad():
                values[node] = run.run_node(node)
    for node in [node for node in values if _is_folded(node, values)]:
        names.append(_constant_name(node, values, names))
        set_tensor_(graph, names[-1], values[node].detach().clone(memory_format=torch.contiguous_format))
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(names[-1])
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
    remove_unused_(graph)
    return tuple(names)


def _is_folded(node: fx.Node, free: Collection[fx.Node]) -> bool:
    is_range = any(name in str(node.target) for name in ("arange", "linspace", "eye"))
    is_taken = node.op != "get_attr" and not _takes_rows(node) and any(user not in free for user in node.users)
    return is_taken and isinstance(node.meta.get("val"), Tensor) and (bool(node.all_input_nodes) or is_range)


def _takes_rows(node: fx.Node) -> bool:
    """Check for a node that slices rows off a parameter [rows, columns]; unfolded, the columns can still be removed."""
    if operation(node) not in ("slice", "select") or node.args[1] != 0:
        return False
    (table,) = node.all_input_nodes
    return table.op == "get_attr" and table.meta["val"].dim() == 2


def _constant_name(node: fx.Node, free: Collection[fx.Node], used: Collection[str]) -> str:
    sources = [each for each in find_reachable([node]) if each.op == "get_attr"]
    for each in sources:
        value = each.meta["val"]
        is_same = value.shape == node.meta["val"].shape and value.is_floating_point() and str(each.target) not in used
        if is_same and all(
            at in free for at in find_reachable([each], lambda at: [user for user in at.users if user is not node])
        ):
            return str(each.target)
    name = f"{sources[0].target}_folded" if sources else NUMBERS
    count = sum(each == name or each.startswith(f"{name}_") for each in used)
    return f"{name}_{count}" if count else name


NAME = "mean_weight"
_SCALED = frozenset(("div", "add", "clamp_min", "clamp")) | SAME


def replace_means_(graph: fx.GraphModule) -> None:
    """Replace divisors that are means over channels by linear layers [1, channels], without recompiling the graph."""
    where = next((each.device for each in graph.parameters()), torch.device("cpu"))
    modules = dict(graph.named_modules())
    for count, (node, source, axis) in enumerate(list(_means(graph.graph))):
        path, value = module_of(node)[0], source.meta["val"]
        name = f"{path if path in modules else ''}.{NAME}_{count}".lstrip(".")
        channels = value.shape[axis]
        weight = torch.full((1, channels), 1.0 / channels, dtype=value.dtype, device=where)
        set_tensor_(graph, name, weight)
        order = [*(dim for dim in range(value.dim()) if dim != axis), axis]
        with graph.graph.inserting_before(node):
            mean_weight = graph.graph.get_attr(name)
            mean_weight.meta = {**node.meta, "val": weight, "sizes": tuple(weight.shape)}
            moved = _moved(graph.graph, source, order, node)
            layer = graph.graph.call_function(torch.ops.aten.linear.default, (moved, mean_weight))
            sizes = tuple(node.meta["sizes"][dim] for dim in order)
            layer.meta = {**node.meta, "val": node.meta["val"].permute(order), "sizes": sizes}
            mean = _moved(graph.graph, layer, [order.index(dim) for dim in range(value.dim())], node)
        node.replace_all_uses_with(mean)
        graph.graph.erase_node(node)


def is_mean_weight(weight: str) -> bool:
    """Check by a weight's name whether its layer replaces a mean over channels."""
    return weight.rpartition(".")[2].startswith(f"{NAME}_")


def _moved(graph: fx.Graph, source: fx.Node, order: list[int], like: fx.Node) -> fx.Node:
    if order == sorted(order):
        return source
    node = graph.call_function(torch.ops.aten.permute.default, (source, order))
    sizes = tuple(source.meta["sizes"][dim] for dim in order)
    node.meta = {**like.meta, "val": source.meta["val"].permute(order), "sizes": sizes}
    return node


def _means(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """Yield means over one axis that divide their own input, with that input and the axis."""
    for node in graph.nodes:
        if operation(node) != "mean" or len(node.args) < 3 or node.args[2] is not True:
            continue
        source, dims = node.args[:2]
        rank = len(source.meta["val"].shape)
        if len(dims) == 1 and rank > 2 and dims[0] % rank in (1, rank - 1) and _divides(node, source):
            yield node, source, dims[0] % rank


def _divides(mean: fx.Node, source: fx.Node) -> bool:
    """Check that a mean serves as a divisor of its source only, at most clamped or with numbers added."""
    at = mean
    while len(at.users) == 1:
        (user,) = at.users
        if operation(user) == "div" and user.args[:2] == (source, at):
            return True
        if operation(user) not in _SCALED or user.all_input_nodes != [at]:
            return False
        at = user
    return False
