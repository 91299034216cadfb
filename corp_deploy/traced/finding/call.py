"""One call of an op in a program, its arguments by their names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from corp_deploy.traced.programs.program import module_of, operation, sizes_at_one

from .labels import LabelTensor

Value = Any
"""Of a node: Marks, a tuple of them, or the number that it is at a batch of 1."""


@dataclass(frozen=True, slots=True)
class Call:
    """`values`: of all nodes before it; `arguments`: by their names in the op's schema, defaults among them; `shape` of
    what it gives, at a batch of 1.
    """

    node: fx.Node
    values: Mapping[fx.Node, Value]
    arguments: dict[str, Any]
    shape: Any

    @property
    def op(self) -> str:
        return operation(self.node)

    def giving(self, shape: tuple[int, ...]) -> "Call":
        """A part of the call, that gives something of another shape."""
        return replace(self, shape=shape)

    @property
    def where(self) -> str:
        """The op and its module, for people."""
        path, kind = module_of(self.node)
        return f"{self.op} in {path or 'the model'}{f' ({kind})' * bool(kind)}"

    def because(self, what: str, marks: LabelTensor) -> str:
        """Why labels stay that meet a tensor without any, by the first of all reasons."""
        return f"{self.where} {what} what can't be narrowed: {marks.why.rpartition(': ')[2]}"

    def __getitem__(self, name: str) -> Any:
        """An argument as numbers, Marks where it is a tensor, lists of either."""
        return self.valued(self.arguments.get(name))

    def valued(self, argument: Any) -> Any:
        return fx.map_arg(argument, lambda node: self.values[node])

    @property
    def tensors(self) -> list[LabelTensor]:
        """All that enters it, in order."""
        entering = (self.values[node] for node in self.node.all_input_nodes)
        return [each for each in entering if isinstance(each, LabelTensor)]


def call_of(node: fx.Node, values: Mapping[fx.Node, Value]) -> Call:
    """The call that a node is."""
    target = node.target
    named: dict[str, Any] = {str(place): each for place, each in enumerate(node.args)}
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema.arguments
        named = {each.name: each.default_value for each in schema if each.has_default_value()}
        named |= {each.name: argument for each, argument in zip(schema, node.args, strict=False)}
    return Call(node, values, named | dict(node.kwargs), sizes_at_one(node))
