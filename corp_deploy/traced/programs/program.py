"""Traced programs: flat graphs of ATen calls; arguments, modules, sizes and batch axes of nodes; copies of modules."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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
        # some elements, or all in another order or repeated
        """permute transpose t mT movedim moveaxis swapaxes swapdims slice select narrow split split_with_sizes chunk
        tensor_split unsafe_split unsafe_chunk unbind roll flip expand expand_as repeat tile repeat_interleave
        pixel_shuffle pixel_unshuffle channel_shuffle unfold diagonal broadcast_to""",
    )
)
"""Ops that change no value: SAME keeps places, SHAPED keeps the order, RUN selects, reorders or repeats elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A traced model: a graph that owns the parameters, with values that need no input folded into constants.

    `model`: the name of the traced class. `any_batch`: whether the graph runs at any batch size, or at that of the
    example alone. `folded`: the names of the folded constants.
    """

    graph: fx.GraphModule
    model: str
    any_batch: bool
    folded: tuple[str, ...]

    @property
    def nodes(self) -> Iterator[fx.Node]:
        return iter(self.graph.graph.nodes)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.nodes if node.op == "placeholder")

    @property
    def output(self) -> fx.Node:
        (output,) = (node for node in self.nodes if node.op == "output")
        return output

    @property
    def device(self) -> torch.device:
        return next(self.graph.parameters()).device

    def tensor(self, name: str) -> Tensor:
        return tensor_of(self.graph, name)


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """Return a module's parameter, buffer or constant by its dotted name."""
    owner, _, last = name.rpartition(".")
    value = getattr(module.get_submodule(owner), last)
    assert isinstance(value, Tensor), (name, type(value))
    return value


def constant_names(nodes: Iterable[fx.Node]) -> dict[str, None]:
    """Return the names of the parameters and constants that nodes read, in order, each once."""
    return {str(node.target): None for node in nodes if node.op == "get_attr"}


def count_uses(program: Program) -> Counter[str]:
    reads = (node for node in program.nodes if node.op == "get_attr")
    return Counter(str(node.target) for node in reads for _ in node.users)


def set_tensor_(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter without gradient, or a buffer, under a dotted name, in place of what had the name before."""
    owner, _, last = name.rpartition(".")
    module = module.get_submodule(owner)
    vars(module).pop(last, None)  # a constant tensor that the model's code keeps as a plain attribute
    if last in module._parameters or (isinstance(value, nn.Parameter) and last not in module._buffers):
        module._parameters[last] = nn.Parameter(value.detach(), requires_grad=False)
    else:
        module.register_buffer(last, value)


def delete_tensor_(module: nn.Module, name: str) -> None:
    owner, _, last = name.rpartition(".")
    delattr(module.get_submodule(owner), last)


def remove_dead_nodes_(graph: fx.Graph) -> None:
    """Remove nodes without users, also dropout in evaluation, which torch counts as impure."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def remove_unused_(graph: fx.GraphModule) -> None:
    """Remove nodes without users and the constants that only they read, and compile the graph anew."""
    before = constant_names(graph.graph.nodes)
    remove_dead_nodes_(graph.graph)
    for name in before.keys() - constant_names(graph.graph.nodes).keys():
        delete_tensor_(graph, name)
    graph.recompile()


def operation(node: fx.Node) -> str:
    """Name a node's operation: `linear` for `aten.linear.default`, `getitem` for Python's operator, else `node.op`."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return str(getattr(node.target, "__name__", node.target))


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return a call's arguments by their names in the op's schema, with defaults; a Python function's by position."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(place): each for place, each in enumerate(node.args)} | dict(node.kwargs)
    schema = node.target._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return defaults | {each.name: value for each, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)


def find_reachable(
    starts: Iterable[fx.Node], along: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes
) -> dict[fx.Node, None]:
    """Return these nodes and all that can be reached from them, nearest first; by default along their inputs."""
    found = dict.fromkeys(starts)
    front = list(found)
    for node in front:
        new = [each for each in along(node) if each not in found]
        found |= dict.fromkeys(new)
        front += new
    return found


def module_of(node: fx.Node) -> tuple[str, str]:
    """Return the path and the class name of the innermost module that a node was called in; empty without one."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else kind.__name__
    return str(path).split("@")[0], kind.rpartition(".")[2]


def sizes_at_one(node: fx.Node) -> Any:
    """Return the shape of a node's result at a batch of 1, a tuple of shapes for several tensors, else None."""
    sizes = node.meta.get("sizes")
    return _at_one(sizes) if isinstance(sizes, tuple) else None


def number_at_one(node: fx.Node) -> int | None:
    """Return the integer that a node gives at a batch of 1; None for any other result, such as a tensor."""
    size = node.meta.get("sizes")
    return _at_one(size) if isinstance(size, int | BatchAffineSize) else None


def _at_one(sizes: Any) -> Any:
    if isinstance(sizes, tuple):
        return tuple(map(_at_one, sizes))
    return sizes.at(1) if isinstance(sizes, BatchAffineSize) else sizes


def sizes_of_any_batch(node: fx.Node, sizes: Sequence[int]) -> list[int] | None:
    """Return `sizes` with -1 for the axis that depends on the batch in the node's result; None if several do."""
    dense = node.meta["sizes"]
    shape = [-1 if isinstance(each, BatchAffineSize) else size for each, size in zip(dense, sizes, strict=True)]
    return None if shape.count(-1) > 1 else shape


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAxis:
    """The axis of a tensor that flattens [outer, images, inner] in row-major order, such as an axis of windows."""

    axis: int
    outer: int
    inner: int

    def in_front(self, x: Tensor) -> Tensor:
        """Return the tensor as [images, *sizes], where `sizes` is the shape at a batch of 1."""
        apart = x.unflatten(self.axis, (self.outer, -1, self.inner)).movedim(self.axis + 1, 0)
        return apart.flatten(self.axis + 1, self.axis + 2)

    def back(self, x: Tensor) -> Tensor:
        """Undo `in_front`."""
        apart = x.unflatten(self.axis + 1, (self.outer, self.inner)).movedim(0, self.axis + 1)
        return apart.flatten(self.axis, self.axis + 2)


IN_FRONT = BatchAxis(axis=0, outer=1, inner=1)
"""The batch axis of a tensor whose first axis counts images alone."""


def batch_axis_of(node: fx.Node) -> BatchAxis | None:
    """Return the batch axis of a node's tensor; None if unknown, as in a program for one batch size."""
    axis, sizes = _batch_dependent_axis(node)
    if axis is None or sizes[axis] == 1:
        return None if axis is None else BatchAxis(axis=axis, outer=1, inner=1)
    before = next((each for each in node.all_input_nodes if _batch_dependent_axis(each)[0] is not None), None)
    place = None if before is None else batch_axis_of(before)
    if before is None or place is None:
        return None
    old, outer, inner = _batch_dependent_axis(before)[1], place.outer, place.inner
    times, rest = divmod(sizes[axis], old[place.axis])
    if operation(node) in SHAPED:
        outer, rest = divmod(math.prod(old[: place.axis]) * outer, math.prod(sizes[:axis]))
        inner = sizes[axis] // max(outer, 1)
    elif operation(node) == "repeat":
        outer *= times
    elif operation(node) == "repeat_interleave":
        inner *= times
    return BatchAxis(axis=axis, outer=outer, inner=inner) if outer * inner == sizes[axis] and not rest else None


def _batch_dependent_axis(node: fx.Node) -> tuple[int | None, tuple[int, ...]]:
    """Return the one axis whose size depends on the batch and the sizes at a batch of 1, or None and ()."""
    sizes: Any = node.meta.get("sizes")
    sizes = sizes if isinstance(sizes, tuple) else ()
    sizes = sizes[0] if sizes and isinstance(sizes[0], tuple) else sizes
    axes = [dim for dim, size in enumerate(sizes) if isinstance(size, BatchAffineSize)]
    return (axes[0], _at_one(sizes)) if len(axes) == 1 else (None, ())


Module = TypeVar("Module", bound=nn.Module)


def copy_module(module: Module, convert: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Module:
    """Copy a module, each parameter and buffer converted; by default the copy shares the tensors.

    Modules that cache tables at their first call change their own state; a run of a copy leaves the original as it was.
    """
    memo: dict[int, Any] = {}
    for each in (*module.parameters(), *module.buffers()):
        new = convert(each)
        is_other = isinstance(each, nn.Parameter) and new is not each
        memo[id(each)] = nn.Parameter(new.detach(), requires_grad=False) if is_other else new
    return copy.deepcopy(module, memo)


def copy_to_meta(module: Module) -> Module:
    """Copy a module to the meta device: the names and shapes of its weights without their values."""
    return copy_module(module, lambda tensor: tensor.detach().to("meta"))
