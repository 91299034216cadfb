"""Elements followed through moves, by running the moves on their numbers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from corp_deploy.traced.programs.program import RUN, SAME, SHAPED, number_of, operation

_SCALING = frozenset(("mul", "div"))


def is_move(node: fx.Node) -> bool:
    """Whether it puts elements of its first argument elsewhere, and nothing else."""
    is_first = bool(node.all_input_nodes) and node.args[0] is node.all_input_nodes[0]
    return is_first and operation(node) in RUN | SAME | SHAPED | {"getitem"}


def way_to(node: fx.Node, passes: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The nodes that lead to a node by their first arguments, itself last, from the first that isn't passed on."""
    way = [node]
    while passes(way[0]):
        way.insert(0, way[0].all_input_nodes[0])
    return way


def carried(numbers: Tensor, way: Iterable[fx.Node]) -> dict[fx.Node, Any]:
    """What each move of a way makes of numbers in the place of what the first node gives; scaling leaves them."""
    first, *moves = way
    values: dict[fx.Node, Any] = {first: numbers}
    for node in moves:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: values.get(each, number_of(each)))
        assert callable(node.target), node
        values[node] = args[0] if operation(node) in _SCALING else node.target(*args, **kwargs)
    return values


def numbered(shape: tuple[int, ...], dim: int) -> Tensor:
    """Of a shape, each element its place along one axis."""
    sizes = [-1 if each == dim else 1 for each in range(len(shape))]
    return torch.arange(shape[dim]).view(sizes).expand(shape)


def along(numbers: Tensor, shape: tuple[int, ...], dim: int) -> Tensor | None:
    """The places along one axis of a shape that moved numbers stand at, where moves changed nothing but their order."""
    others = [size for place, size in enumerate(shape) if place != dim]
    if numbers.dim() != len(shape) or [size for place, size in enumerate(numbers.shape) if place != dim] != others:
        return None
    lines = numbers.movedim(dim, 0).reshape(numbers.shape[dim], -1)
    return lines[:, 0] if torch.equal(lines, lines[:, :1].expand_as(lines)) else None


def moved_from(node: fx.Node) -> fx.Node:
    """What gives all that a node gives, where moves, or a scaling by one number, are all that lies between; else the
    last of what does lie there.
    """
    return way_to(node, _is_passed)[0]


def _is_passed(node: fx.Node) -> bool:
    return is_move(node) or (operation(node) in _SCALING and isinstance(node.args[1], int | float))
