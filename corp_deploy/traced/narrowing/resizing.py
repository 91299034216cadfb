"""New arguments of an op whose tensors have become narrower, such as sizes to reshape or to split to."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from corp_deploy.traced.finding.flow import Call
from corp_deploy.traced.finding.labels import FIXED, LabelTensor, Uneven, compact, keep_mask, narrow_value
from corp_deploy.traced.programs.program import RUN, SHAPED, sizes_of_any_batch

aten = torch.ops.aten
Arguments = dict[str, Any]
SPLITS = frozenset(["split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"])
CUTS = {"slice": "start", "narrow": "start", "select": "index"}


def sizes_to_reshape(node: fx.Node, sizes: Sequence[int]) -> list[int]:
    """Return `sizes` with -1 for the axis that depends on the batch; raise Uneven if several do."""
    shape = sizes_of_any_batch(node, sizes)
    if shape is None:
        raise Uneven(f"several axes of {tuple(sizes)} depend on the batch size")
    return shape


def resize_call(call: Call, value: Any, gone: Tensor) -> tuple[Callable[..., Any], Arguments]:
    """Return the op and named arguments, still dense nodes, of a call on narrower tensors; raise Uneven if none fit."""
    target, arguments, new = call.node.target, dict(call.arguments), narrow_value(value, gone)
    assert callable(target), call.node
    if call.op in SHAPED:
        return aten.reshape.default, {"self": arguments["self"], "shape": sizes_to_reshape(call.node, new.shape)}
    if call.op in ("expand", "broadcast_to"):
        arguments["size"] = _expanded_sizes(call, value.shape, new.shape)
    elif call.op in SPLITS:
        sizes = [each.shape[arguments["dim"]] for each in new]
        arguments = {"self": arguments["self"], "split_sizes": sizes, "dim": arguments["dim"]}
        return aten.split_with_sizes.default, arguments
    elif call.op in CUTS and arguments["dim"] % len(call["self"].shape) in call["self"].dims:
        arguments |= _slice_arguments(call, new, gone)
    elif call.op == "scaled_dot_product_attention" and arguments["scale"] is None:
        arguments["scale"] = float(call["query"].shape[-1]) ** -0.5
    elif call.op == "group_norm":
        size = call["input"].shape[1] // arguments["num_groups"]
        arguments["num_groups"] = narrow_value(call["input"], gone).shape[1] // size
    elif call.op.startswith("conv") and arguments["groups"] == call["input"].shape[1] > 1:
        arguments["groups"] = narrow_value(call["input"], gone).shape[1]
    return target, arguments


def _expanded_sizes(call: Call, old: tuple[int, ...], new: tuple[int, ...]) -> list[Any]:
    new_sizes, before = call.arguments["size"], call["self"].shape
    missing = len(old) - len(before)
    sizes = [each if was == now else now for each, was, now in zip(new_sizes, old, new, strict=True)]
    for dim, size in enumerate(sizes):
        if size != new_sizes[dim] and dim >= missing and before[dim - missing] == old[dim]:
            sizes[dim] = -1
        elif size != new_sizes[dim] and isinstance(new_sizes[dim], fx.Node):
            raise Uneven(f"axis {dim} depends on the batch size too")
    return sizes


def _slice_arguments(call: Call, new: LabelTensor, gone: Tensor) -> Arguments:
    first: LabelTensor = call["self"]
    dim, name = call["dim"] % len(first.shape), CUTS[call.op]
    is_whole = narrow_value(first, gone).shape[dim] == first.shape[dim]
    if call.arguments.get("step", 1) != 1 or first.labels is None or is_whole:
        return {}
    start = (call[name] or 0) % first.shape[dim]
    keep = keep_mask(compact(first.labels), gone)
    before = torch.unique(keep.narrow(dim, 0, start).sum(dim)[keep.any(dim)]).tolist() or [0]
    if len(before) > 1:
        raise Uneven(call.where)
    if call.op == "select":
        return {name: before[0]}
    length = {"end": before[0] + new.shape[dim]} if call.op == "slice" else {"length": new.shape[dim]}
    return {name: before[0], **length}


def gives_remaining(call: Call, target: Callable[..., Any], arguments: Arguments, value: Any, gone: Tensor) -> bool:
    """Check that a move with these arguments turns the remaining labels of its inputs into those of its result."""
    if call.op not in RUN | SHAPED:
        return True

    def entering(node: fx.Node) -> Any:
        less = narrow_value(call.values[node], gone)
        if not isinstance(less, LabelTensor):
            return less
        return torch.full(less.shape, FIXED, dtype=torch.long) if less.labels is None else less.labels

    result, new = target(**fx.map_arg(arguments, entering)), narrow_value(value, gone)
    both = zip(result, new, strict=True) if isinstance(result, list | tuple) else [(result, new)]
    return all(each.labels is None or torch.equal(actual, each.labels) for actual, each in both)
