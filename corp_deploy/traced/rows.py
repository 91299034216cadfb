"""Which row of a layer's weight each element of a tensor is, where nothing but moves stands between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .moves import RUN, SAME, SHAPED
from .program import number_of, operation, sizes_at_one
from .readers import LINEAR, Called

_SCALING = frozenset(("mul", "div"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Of a layer by the names of its weight and bias; the tensor has the shape of what it is about, at a batch of 1."""

    weight: str
    bias: str
    numbers: Tensor


def rows_of(source: fx.Node, layers: Mapping[fx.Node, Called]) -> Rows | None:
    """Of what a node gives, by any of these layers; None where something else than moves, or a scaling by one number,
    makes it.
    """
    *way, layer = _way(source)
    if layer not in layers:
        return None
    values: dict[fx.Node, Any] = {layer: _numbered(layer)}
    for node in reversed(way):
        values[node] = _moved(node, values)
    return Rows(weight=layers[layer].weight, bias=layers[layer].bias, numbers=values[source])


def moved_from(node: fx.Node) -> fx.Node:
    """What gives all that a node gives, where moves, or a scaling by one number, are all that lies between; else the
    last of what does lie there.
    """
    return _way(node)[-1]


def _way(node: fx.Node) -> list[fx.Node]:
    way = [node]
    while _is_passed(way[-1]):
        way.append(way[-1].all_input_nodes[0])
    return way


def _is_passed(node: fx.Node) -> bool:
    op = operation(node)
    if not node.all_input_nodes or node.args[0] is not node.all_input_nodes[0]:
        return False
    return op == "getitem" or op in RUN | SAME | SHAPED or (op in _SCALING and isinstance(node.args[1], int | float))


def _numbered(layer: fx.Node) -> Tensor:
    """What a layer gives, each element its row's number."""
    shape = sizes_at_one(layer)
    dim = len(shape) - 1 if layer.target is LINEAR else 1
    sizes = [-1 if place == dim else 1 for place in range(len(shape))]
    return torch.arange(shape[dim]).view(sizes).expand(shape)


def _moved(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    if operation(node) in _SCALING:
        return values[node.all_input_nodes[0]]
    assert callable(node.target), node.target

    def value(each: fx.Node) -> Any:
        return values[each] if each in values else number_of(each)

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    return node.target(*args, **kwargs)
