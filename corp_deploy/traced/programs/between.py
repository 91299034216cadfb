"""The piece of a program between one layer and what is made of all that it gives, run by itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .program import Program, number_of, sizes_at_one
from .readers import LINEAR, Called, layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Between:
    """From what `layer` gives for one image to what the last of `nodes` gives, constants with it, in float64."""

    program: Program
    layer: Called
    nodes: tuple[fx.Node, ...]

    @property
    def row_axis(self) -> int:
        """Of what the layer gives, its rows."""
        return len(self.sizes) - 1 if self.layer.node.target is LINEAR else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes: tuple[int, ...] = sizes_at_one(self.layer.node)
        return sizes

    def __call__(self, given: Tensor) -> Tensor:
        values: dict[fx.Node, Any] = {self.layer.node: given.double()}
        for node in self.nodes:
            values[node] = self._value(node, lambda each: values[each] if each in values else number_of(each))
        result: Tensor = values[self.nodes[-1] if self.nodes else self.layer.node]
        return result

    def _value(self, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
        if node.op == "get_attr":
            tensor = self.program.tensor(str(node.target)).detach()
            return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        assert callable(node.target), node
        return node.target(*args, **kwargs)


def between(program: Program, source: fx.Node) -> Between | None:
    """Up to the source; None where it is made of something else than what one layer gives."""
    known, needed, found = {each.node: each for each in layers(program)}, set[fx.Node](), set[fx.Node]()
    front = [source]
    while front:
        node = front.pop()
        if node in known:
            found.add(node)
        elif node.op not in ("get_attr", "call_function"):
            return None
        elif node not in needed and number_of(node) is None:
            needed.add(node)
            front += node.all_input_nodes
    if len(found) != 1:
        return None
    return Between(program=program, layer=known[found.pop()], nodes=tuple(_in_order(program, needed)))


def _in_order(program: Program, nodes: set[fx.Node]) -> Iterable[fx.Node]:
    return (node for node in program.nodes if node in nodes)
