"""The numbers that an op has to be called with when its tensors have become narrower."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .call import Call
from .compaction import Uneven, compacted, kept, left
from .labels import compact, varying
from .marks import Marks
from .moves import RUN, SHAPED

aten = torch.ops.aten
Arguments = dict[str, Any]
_SIZES = {"view": "size", "reshape": "shape", "_unsafe_view": "size", "expand": "size", "broadcast_to": "size"}
_SPLITS = frozenset("split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk".split())


def narrowed(value: Any, gone: Tensor) -> Any:
    """Marks of what is left; raises Uneven."""
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


def resized(call: Call, value: Any, gone: Tensor) -> tuple[Callable[..., Any], Arguments]:
    """The op and its arguments, nodes still the old ones. Raises Uneven where no numbers will do."""
    assert callable(call.node.target), call.node
    target, arguments = call.node.target, dict(call.arguments)
    if call.op in _SIZES:
        name = _SIZES[call.op]
        arguments[name] = _sizes(arguments[name], value, narrowed(value, gone))
    elif call.op == "unflatten":
        old, new = value.shape, narrowed(value, gone).shape
        dim = arguments["dim"] % len(call["self"].shape)
        end = dim + len(arguments["sizes"])
        arguments["sizes"] = _sizes(arguments["sizes"], Marks(old[dim:end]), Marks(new[dim:end]))
    elif call.op in _SPLITS:
        dim = arguments["dim"]
        target, arguments = aten.split_with_sizes.default, {
            "self": arguments["self"],
            "split_sizes": [narrowed(each, gone).shape[dim] for each in value],
            "dim": dim,
        }
    elif call.op in ("slice", "narrow", "select") and arguments["dim"] % len(call["self"].shape) in call["self"].dims:
        arguments |= _cut(call, arguments, narrowed(value, gone), gone)
    elif call.op == "scaled_dot_product_attention" and arguments["scale"] is None:
        arguments["scale"] = float(call["query"].shape[-1]) ** -0.5
    elif call.op == "group_norm":
        size = call["input"].shape[1] // arguments["num_groups"]
        arguments["num_groups"] = narrowed(call["input"], gone).shape[1] // size
    elif call.op.startswith("conv") and arguments["groups"] == call["input"].shape[1] > 1:
        arguments["groups"] = narrowed(call["input"], gone).shape[1]
    return target, arguments


def _sizes(asked: list[Any], old: Marks, new: Marks) -> list[Any]:
    """Sizes as they were asked for; a tuple (node, new, old) where one counts the batch too."""
    missing = len(old.shape) - len(asked)
    given = []
    for each, before, after in zip(asked, old.shape[missing:], new.shape[missing:], strict=True):
        is_same = before == after or (isinstance(each, int) and each == -1)
        given.append(each if is_same else (each, after, before) if isinstance(each, fx.Node) else after)
    return given


def _cut(call: Call, arguments: Arguments, new: Marks, gone: Tensor) -> Arguments:
    """Where a slice starts and ends among what is left."""
    first: Marks = call["self"]
    assert first.labels is not None
    dim = arguments["dim"] % len(first.shape)
    if call.op == "slice" and arguments.get("step", 1) != 1:
        return {}
    start = call[{"slice": "start", "narrow": "start", "select": "index"}[call.op]] or 0
    start = start + first.shape[dim] if start < 0 else start
    keep = kept(compact(first.labels), gone)
    has_any = keep.any(dim)
    before = torch.unique(keep.narrow(dim, 0, start).sum(dim)[has_any])
    if len(before) > 1:
        raise Uneven(call.where)
    at = int(before[0]) if len(before) else 0
    if call.op == "select":
        return {"index": at}
    return {"start": at, "end": at + new.shape[dim]} if call.op == "slice" else {"start": at, "length": new.shape[dim]}


def is_move(call: Call) -> bool:
    return call.op in RUN or call.op in SHAPED


def agrees(call: Call, target: Callable[..., Any], arguments: Arguments, value: Any, gone: Tensor) -> bool:
    """Whether a move with these arguments, run on what is left of its tensors' labels, gives what is left of its own."""
    from .moves import SHAPED

    def entering(each: Any) -> Any:
        if isinstance(each, tuple) and len(each) == 3 and isinstance(each[0], fx.Node):
            return each[1]
        marks = call.values[each] if isinstance(each, fx.Node) else each
        if isinstance(marks, Marks):
            less = narrowed(marks, gone)
            return torch.full(less.shape, -1, dtype=torch.int32) if less.labels is None else less.labels
        return marks

    new = narrowed(value, gone)
    given = {name: [entering(one) for one in each] if isinstance(each, list | tuple) and not (len(each) == 3 and isinstance(each[0], fx.Node)) else entering(each) for name, each in arguments.items()}
    if call.op in SHAPED:
        result: Any = given["self"].reshape(new.shape)
    else:
        result = target(**given)
    pairs = zip(result, new, strict=True) if isinstance(result, list | tuple) else [(result, new)]
    return all(each.labels is None or (each.shape == tuple(got.shape) and torch.equal(got, each.labels)) for got, each in pairs)


__all__ = ["agrees", "is_move", "left", "loses", "narrowed", "resized", "varying"]
