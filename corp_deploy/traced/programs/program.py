"""A model's program: a flat graph of its calls to ATen under the names of its state dict, and what nodes say."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .sizes import BatchAffineSize

SAME, SHAPED, RUN = (
    frozenset(ops.split())
    for ops in (
        # the same elements in the same places
        """alias clone contiguous detach detach_ dropout dropout_ feature_dropout alpha_dropout lift_fresh
        lift_fresh_copy to _to_copy type_as resolve_conj resolve_neg""",
        # all elements in their order
        "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as ravel",
        # run on the labels as they are
        """permute transpose t mT movedim moveaxis swapaxes swapdims slice select narrow split split_with_sizes chunk
        tensor_split unsafe_split unsafe_chunk unbind roll flip expand expand_as repeat tile repeat_interleave
        pixel_shuffle pixel_unshuffle channel_shuffle unfold diagonal broadcast_to""",
    )
)
"""Ops that put elements elsewhere and change none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A traced model; `graph` runs it and has its parameters, those that were computed folded into constants.

    `model`: the class it was traced from. `any_batch`: whether it runs at any batch, or at that of the example alone.
    `folded`: the constants that stand for what was computed from parameters.
    """

    graph: fx.GraphModule
    model: str
    any_batch: bool
    folded: tuple[str, ...]

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """In order of the program."""
        return iter(self.graph.graph.nodes)

    @property
    def output(self) -> fx.Node:
        (output,) = (node for node in self.nodes if node.op == "output")
        return output

    def tensor(self, name: str) -> Tensor:
        """A parameter or constant by its name."""
        return tensor_of(self.graph, name)


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """A parameter or constant by its name."""
    owner, _, last = name.rpartition(".")
    value = getattr(module.get_submodule(owner), last)
    assert isinstance(value, Tensor), (name, type(value))
    return value


def constant_names(nodes: Iterable[fx.Node]) -> set[str]:
    """The names of all parameters and constants."""
    return {str(node.target) for node in nodes if node.op == "get_attr"}


def settle_(graph: fx.GraphModule) -> None:
    """Without what nothing needs any more, and the constants that it alone took."""
    before = constant_names(graph.graph.nodes)
    # What drops nothing in evaluation counts as random, though.
    graph.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    for name in before - constant_names(graph.graph.nodes):
        owner, _, last = name.rpartition(".")
        delattr(graph.get_submodule(owner), last)
    graph.recompile()


def operation(node: fx.Node) -> str:
    """`linear` of `aten.linear.default`, `getitem` of the Python operator; other nodes by what they are."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return str(getattr(node.target, "__name__", node.target))


def module_of(node: fx.Node) -> tuple[str, str]:
    """The path and the class of the innermost module that a node was called in."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else kind.__name__
    return str(path).split("@")[0], kind.rpartition(".")[2]


def changes_in_place(node: fx.Node) -> bool:
    """Whether a call changes its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def sizes_at_one(node: fx.Node) -> Any:
    """The shape of what a node gives at a batch of 1; a tuple of them where it gives several tensors; else None."""
    sizes = node.meta.get("sizes")
    return _at_one(sizes) if isinstance(sizes, tuple) else None


def number_of(node: fx.Node) -> int | None:
    """The size that a node gives at a batch of 1; None for a tensor."""
    size = node.meta.get("sizes")
    return _at_one(size) if isinstance(size, int | BatchAffineSize) else None


def _at_one(sizes: Any) -> Any:
    if isinstance(sizes, tuple):
        return tuple(map(_at_one, sizes))
    return sizes.at(1) if isinstance(sizes, BatchAffineSize) else sizes
