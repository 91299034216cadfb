"""Parts of a program that run alone: from one layer's output on, or all nodes that certain end nodes need."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .program import Program, find_reachable, number_at_one, sizes_at_one
from .readers import LINEAR, CalledLayer, layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subprogram:
    """A callable part of a program, in float64: maps a layer's output for one image to the last of `nodes`."""

    program: Program
    layer: CalledLayer
    nodes: tuple[fx.Node, ...]

    @property
    def row_axis(self) -> int:
        """The axis of the layer's output that counts the rows of its weight."""
        return len(self.sizes) - 1 if self.layer.node.target is LINEAR else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return sizes_at_one(self.layer.node)

    def __call__(self, x: Tensor) -> Tensor:
        every = evaluate_nodes(self.program, self.nodes, {self.layer.node: x.double()}, torch.float64)
        return every[self.nodes[-1] if self.nodes else self.layer.node]


def evaluate_nodes(
    program: Program, nodes: Iterable[fx.Node], values: Mapping[fx.Node, Tensor], dtype: torch.dtype | None = None
) -> dict[fx.Node, Any]:
    """Run nodes for one image, floating constants cast to `dtype`; return, by node, their and the known `values`."""
    every: dict[fx.Node, Any] = dict(values)
    for node in nodes:
        if node.op == "get_attr":
            tensor = program.tensor(str(node.target)).detach()
            every[node] = tensor.to(dtype, copy=True) if dtype is not None and tensor.is_floating_point() else tensor
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: every.get(each, number_at_one(each)))
        assert callable(node.target), node
        every[node] = node.target(*args, **kwargs)
    return every


def subprogram_before(program: Program, source: fx.Node) -> Subprogram | None:
    """Return the part that computes a node from one layer's output; None if the node depends on anything else."""
    by_node = {each.node: each for each in layers(program)}
    nodes, found = nodes_to_run(program, [source], by_node)
    if nodes is None or len(found) != 1:
        return None
    return Subprogram(program=program, layer=by_node[found.pop()], nodes=nodes)


def nodes_to_run(
    program: Program, ends: Iterable[fx.Node], available: Collection[fx.Node]
) -> tuple[tuple[fx.Node, ...] | None, set[fx.Node]]:
    """Return the nodes to run for `ends`, in order, or None if these need inputs; and the `available` nodes used."""

    def entering(node: fx.Node) -> list[fx.Node]:
        return [] if node in available or number_at_one(node) is not None else node.all_input_nodes

    every = find_reachable(ends, entering)
    found = {node for node in every if node in available}
    if any(node.op not in ("get_attr", "call_function") for node in every.keys() - found):
        return None, found
    inside = (node for node in program.nodes if node in every and node not in found)
    return tuple(node for node in inside if number_at_one(node) is None), found
