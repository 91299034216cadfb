"""Means over the channels that each channel is divided by, as global response norms have them (arXiv 2301.00808,
section 3), as layers of equal weights: what is left of channels then tells the mean of all by weights of its own.
"""

from collections.abc import Iterator

import torch
from torch import fx

from .program import SAME, module_of, operation, set_tensor_

NAME = "mean_weight"
_SCALED = frozenset(("div", "add", "clamp_min", "clamp")) | SAME


def means_as_layers_(graph: fx.GraphModule) -> None:
    """Linear layers of a constant weight [1, channels] in their place."""
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
    graph.recompile()


def is_mean(weight: str) -> bool:
    """Whether a layer's weight, by its name, is one of those."""
    return weight.rpartition(".")[2].startswith(f"{NAME}_")


def _moved(graph: fx.Graph, source: fx.Node, order: list[int], like: fx.Node) -> fx.Node:
    """With its axes in another order."""
    if order == sorted(order):
        return source
    node = graph.call_function(torch.ops.aten.permute.default, (source, order))
    sizes = tuple(source.meta["sizes"][dim] for dim in order)
    node.meta = {**like.meta, "val": source.meta["val"].permute(order), "sizes": sizes}
    return node


def _means(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """Means over one axis of what they divide afterwards, with what that is and the axis."""
    for node in graph.nodes:
        if operation(node) != "mean" or len(node.args) < 3 or node.args[2] is not True:
            continue
        source, dims = node.args[:2]
        rank = len(source.meta["val"].shape)
        if len(dims) == 1 and rank > 2 and dims[0] % rank in (1, rank - 1) and _divides(node, source):
            yield node, source, dims[0] % rank


def _divides(mean: fx.Node, source: fx.Node) -> bool:
    """Whether all that is made of a mean, with numbers added at most, is what its source is divided by."""
    at = mean
    while len(at.users) == 1:
        (user,) = at.users
        if operation(user) == "div" and user.args[:2] == (source, at):
            return True
        if operation(user) not in _SCALED or user.all_input_nodes != [at]:
            return False
        at = user
    return False
