"""Sizes that the batch counts, told apart from others by what two batches of different sizes give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

BATCHES = (2, 5)
"""No half, third, square or remainder of a batch is a whole multiple of it for both, with nothing taken away."""


class BatchDependentProgram(Exception):
    """A program is another one at another batch."""


@dataclass(frozen=True, slots=True)
class BatchAffineSize:
    """A size: so many times the batch and some more."""

    times: int
    more: int = 0

    def at(self, batch: int) -> int:
        return self.times * batch + self.more


Size = int | BatchAffineSize


def size_from_batches(first: int, other: int) -> Size:
    """Of what it is at each of BATCHES. Raises BatchDependentProgram."""
    if first == other:
        return first
    times, rest = divmod(other - first, BATCHES[1] - BATCHES[0])
    more = first - times * BATCHES[0]
    if rest or times < 0 or more < 0:
        raise BatchDependentProgram(f"{first} at a batch of {BATCHES[0]}, {other} at one of {BATCHES[1]}")
    return BatchAffineSize(times, more)


def sizes_from_batches(first: Any, other: Any) -> Any:
    """Of a tensor its shape, of several a tuple of them, of a number itself; None of what else a node gives."""
    if isinstance(first, Tensor):
        if first.dim() != other.dim():
            raise BatchDependentProgram(f"{tuple(first.shape)} and {tuple(other.shape)}")
        return tuple(map(size_from_batches, first.shape, other.shape))
    if isinstance(first, list | tuple):
        return tuple(map(sizes_from_batches, first, other))
    return size_from_batches(first, other) if isinstance(first, int) and not isinstance(first, bool) else None


def set_sizes(node: fx.Node, first: Any, other: Any) -> None:
    """Of a node what it gives, `val` on meta, and of which `sizes`, by what it gives at each of BATCHES."""
    node.meta["val"] = first.to("meta") if isinstance(first, Tensor) else first
    node.meta["sizes"] = sizes_from_batches(first, other)


def inputs_at_batch(inputs: Any, batch: int) -> Any:
    """The same inputs on meta, so many of them; a tensor without axes as it is."""

    def many(tensor: Tensor) -> Tensor:
        shape = (batch, *tensor.shape[1:]) if tensor.dim() else ()
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return tree_map_only(Tensor, many, inputs)


def sizes_key(value: Any) -> Any:
    """Equal for arguments by which a call gives the same sizes."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(sizes_key, value))
    return tuple(map(sizes_key, value.items())) if isinstance(value, dict) else (type(value), value)


def changes_in_place(node: fx.Node) -> bool:
    """Whether a call changes its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class MetaCalls:
    """Results of calls on the meta device, by sizes_key of their arguments; emptied where there are too many."""

    def __init__(self, limit: int = 20_000) -> None:
        self._gave, self._limit = dict[Any, Any](), limit

    def get(self, key: Any) -> Any:
        return self._gave.get(self._mode(key))

    def put(self, key: Any, gives: Any) -> None:
        if len(self._gave) >= self._limit:
            self._gave.clear()
        self._gave[self._mode(key)] = gives

    def _mode(self, key: Any) -> Any:
        return key, torch.get_default_dtype(), torch.is_inference_mode_enabled()


_CALLS = MetaCalls()


@torch.no_grad()
def call_on_meta(target: Callable[..., Any], args: Any, kwargs: Any, calls: MetaCalls = _CALLS) -> Any:
    """What a call gives, of which no number is computed."""
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
    key = target, sizes_key((args, kwargs))
    gives = calls.get(key)
    if gives is None:
        gives = target(*args, **kwargs)
        calls.put(key, gives)
    return gives


class _OnMeta(fx.Interpreter):
    """A program of which no number is computed. `calls`: its own where it changes tensors, which others have then."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.calls = MetaCalls() if any(map(changes_in_place, graph.graph.nodes)) else _CALLS

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().get_attr(target, args, kwargs).to("meta")

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return call_on_meta(target, args, kwargs, self.calls)


def infer_sizes_(graph: fx.GraphModule, inputs: Sequence[Tensor], *, any_batch: bool) -> None:
    """Tell every node what it gives, on meta, and of which sizes."""
    runs = _OnMeta(graph), _OnMeta(graph)
    for run, batch in zip(runs, BATCHES if any_batch else (len(inputs[0]),) * 2, strict=True):
        run.run(*inputs_at_batch(inputs, batch), enable_io_processing=False)
    for node in graph.graph.nodes:
        set_sizes(node, *(run.env[node] for run in runs))
