"""Sizes of nodes as affine functions of the batch size, found by running at two batch sizes on the meta device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

BATCHES = (2, 5)
"""Two batch sizes for which no half, third, square or remainder of the batch looks like a multiple of it."""


class BatchDependentProgram(Exception):
    """The error of a model that can't be recorded as one graph for every batch size."""


@dataclass(frozen=True, slots=True)
class BatchAffineSize:
    """A size: `times` the batch plus `more`."""

    times: int
    more: int = 0

    def at(self, batch: int) -> int:
        return self.times * batch + self.more


def size_from_batches(first: int, other: int) -> int | BatchAffineSize:
    """Return the size with these values at BATCHES, an int if equal; raise BatchDependentProgram if not affine."""
    if first == other:
        return first
    times, rest = divmod(other - first, BATCHES[1] - BATCHES[0])
    more = first - times * BATCHES[0]
    if rest or times < 0 or more < 0:
        raise BatchDependentProgram(f"{first} at a batch of {BATCHES[0]}, {other} at one of {BATCHES[1]}")
    return BatchAffineSize(times, more)


def sizes_from_batches(first: Any, other: Any) -> Any:
    """Return a tensor's shape, the shapes of several, or an integer, from results at each of BATCHES; else None."""
    if isinstance(first, Tensor):
        if first.dim() != other.dim():
            raise BatchDependentProgram(f"{tuple(first.shape)} and {tuple(other.shape)}")
        return tuple(map(size_from_batches, first.shape, other.shape))
    if isinstance(first, list | tuple):
        return tuple(map(sizes_from_batches, first, other))
    return size_from_batches(first, other) if isinstance(first, int) and not isinstance(first, bool) else None


def set_sizes(node: fx.Node, first: Any, other: Any) -> None:
    """Record a node's result on meta (`val`) and its sizes (`sizes`), from its results at each of BATCHES."""
    node.meta["val"] = first.to("meta") if isinstance(first, Tensor) else first
    node.meta["sizes"] = sizes_from_batches(first, other)


def inputs_at_batch(inputs: Any, batch: int) -> Any:
    """Return the inputs as empty meta tensors at another batch size; tensors without axes stay without."""

    def resize(tensor: Tensor) -> Tensor:
        shape = (batch, *tensor.shape[1:]) if tensor.dim() else ()
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return tree_map_only(Tensor, resize, inputs)


def sizes_key(value: Any) -> Any:
    """Return a key of a call's arguments; equal keys mean results of equal sizes."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(sizes_key, value))
    return tuple(map(sizes_key, value.items())) if isinstance(value, dict) else (type(value), value)


def changes_in_place(node: fx.Node) -> bool:
    """Check whether a node calls an op that changes an argument in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def alike(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the same shape, strides, type and device."""
    return tensor.new_empty_strided(tensor.shape, tensor.stride())


class MetaCalls:
    """A cache of calls' results on the meta device, by sizes_key of their arguments; emptied at its limit."""

    LIMIT = 20_000

    def __init__(self) -> None:
        self._gave = dict[Any, Any]()

    def get(self, key: Any) -> Any:
        return self._gave.get(self._mode(key))

    def put(self, key: Any, gives: Any) -> None:
        if len(self._gave) >= self.LIMIT:
            self._gave.clear()
        self._gave[self._mode(key)] = gives

    def _mode(self, key: Any) -> Any:
        return key, torch.get_default_dtype(), torch.is_inference_mode_enabled()


_CALLS = MetaCalls()


@torch.no_grad()
def call_on_meta(target: Callable[..., Any], args: Any, kwargs: Any, calls: MetaCalls = _CALLS) -> Any:
    """Return the result of a call on the meta device, from the cache `calls` if it has one for equal sizes."""
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
    key = target, sizes_key((args, kwargs))
    gives = calls.get(key)
    if gives is None:
        gives = target(*args, **kwargs)
        calls.put(key, gives)
    return gives


class _OnMeta(fx.Interpreter):
    """An interpreter on the meta device."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        # In-place ops would change cached results of other programs.
        self.calls = MetaCalls() if any(map(changes_in_place, graph.graph.nodes)) else _CALLS

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().get_attr(target, args, kwargs).to("meta")

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return call_on_meta(target, args, kwargs, self.calls)


def infer_sizes_(graph: fx.GraphModule, inputs: Sequence[Tensor], *, any_batch: bool) -> None:
    """Record every node's result on meta and its sizes, for any batch size or only for that of the inputs."""
    runs = _OnMeta(graph), _OnMeta(graph)
    for run, batch in zip(runs, BATCHES if any_batch else (len(inputs[0]),) * 2, strict=True):
        run.run(*inputs_at_batch(inputs, batch), enable_io_processing=False)
    for node in graph.graph.nodes:
        set_sizes(node, *(run.env[node] for run in runs))
