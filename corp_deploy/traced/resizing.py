"""The numbers that an op has to be called with when its tensors have become narrower."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .call import Call
from .compaction import Uneven, compacted, kept
from .emission import Arguments, Scaled, with_nodes
from .labels import FIXED, TYPE, compact
from .marks import Marks
from .moves import RUN, SHAPED

SPLITS = frozenset(["split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"])
_SIZES = {"view": "size", "reshape": "shape", "_unsafe_view": "size", "expand": "size", "broadcast_to": "size"}
_CUTS = {"slice": "start", "narrow": "start", "select": "index"}


def narrowed(value: Any, gone: Tensor) -> Any:
    """Marks of what is left. Raises Uneven."""
    if isinstance(value, tuple):
        return tuple(narrowed(each, gone) for each in value)
    if not isinstance(value, Marks) or value.labels is None:
        return value
    labels = compacted(value.labels, gone)
    return Marks(tuple(labels.shape), labels, value.why)


def loses(value: Any, gone: Tensor) -> bool:
    """Whether elements of it go."""
    if isinstance(value, tuple):
        return any(loses(each, gone) for each in value)
    return isinstance(value, Marks) and value.labels is not None and not bool(kept(compact(value.labels), gone).all())


def resized(call: Call, value: Any, gone: Tensor) -> tuple[Any, Arguments]:
    """The op and its arguments, nodes still the old ones. Raises Uneven where no numbers will do."""
    target, arguments, new = call.node.target, dict(call.arguments), narrowed(value, gone)
    if call.op in _SIZES:
        name = _SIZES[call.op]
        missing = len(value.shape) - len(arguments[name])
        arguments[name] = _sizes(arguments[name], value.shape[missing:], new.shape[missing:])
    elif call.op == "unflatten":
        dim = arguments["dim"] % len(call["self"].shape)
        within = slice(dim, dim + len(arguments["sizes"]))
        arguments["sizes"] = _sizes(arguments["sizes"], value.shape[within], new.shape[within])
    elif call.op in SPLITS:
        sizes = [each.shape[arguments["dim"]] for each in new]
        target = torch.ops.aten.split_with_sizes.default
        arguments = {"self": arguments["self"], "split_sizes": sizes, "dim": arguments["dim"]}
    elif call.op in _CUTS and arguments["dim"] % len(call["self"].shape) in call["self"].dims:
        arguments |= _cut(call, new, gone)
    elif call.op == "scaled_dot_product_attention" and arguments["scale"] is None:
        arguments["scale"] = float(call["query"].shape[-1]) ** -0.5
    elif call.op == "group_norm":
        size = call["input"].shape[1] // arguments["num_groups"]
        arguments["num_groups"] = narrowed(call["input"], gone).shape[1] // size
    elif call.op.startswith("conv") and arguments["groups"] == call["input"].shape[1] > 1:
        arguments["groups"] = narrowed(call["input"], gone).shape[1]
    return target, arguments


def _sizes(asked: list[Any], old: tuple[int, ...], new: tuple[int, ...]) -> list[Any]:
    """Sizes as they were asked for, those that are others now anew."""
    given = []
    for each, before, after in zip(asked, old, new, strict=True):
        is_same = before == after or (isinstance(each, int) and each == -1)
        other = Scaled(each, after, before) if isinstance(each, fx.Node) else after
        given.append(each if is_same else other)
    return given


def _cut(call: Call, new: Marks, gone: Tensor) -> Arguments:
    """Where a slice starts and ends among what is left."""
    first: Marks = call["self"]
    dim, name = call["dim"] % len(first.shape), _CUTS[call.op]
    is_whole = narrowed(first, gone).shape[dim] == first.shape[dim]
    if call.arguments.get("step", 1) != 1 or first.labels is None or is_whole:
        return {}
    start = (call[name] or 0) % first.shape[dim]
    keep = kept(compact(first.labels), gone)
    before = torch.unique(keep.narrow(dim, 0, start).sum(dim)[keep.any(dim)]).tolist() or [0]
    if len(before) > 1:
        raise Uneven(call.where)
    if call.op == "select":
        return {name: before[0]}
    return {
        name: before[0],
        **({"end": before[0] + new.shape[dim]} if call.op == "slice" else {"length": new.shape[dim]}),
    }


def agrees(call: Call, target: Callable[..., Any], arguments: Arguments, value: Any, gone: Tensor) -> bool:
    """Whether a move with these arguments, run on what is left of its tensors' labels, gives what is left of its."""
    if call.op not in RUN | SHAPED:
        return True

    def entering(node: fx.Node) -> Any:
        less = narrowed(call.values[node], gone)
        if not isinstance(less, Marks):
            return less
        return torch.full(less.shape, FIXED, dtype=TYPE) if less.labels is None else less.labels

    new = narrowed(value, gone)
    given = {name: with_nodes(each, entering, lambda size: size.new) for name, each in arguments.items()}
    result = given["self"].reshape(new.shape) if call.op in SHAPED else target(**given)
    both = zip(result, new, strict=True) if isinstance(result, list | tuple) else [(result, new)]
    return all(each.labels is None or torch.equal(got, each.labels) for got, each in both)
