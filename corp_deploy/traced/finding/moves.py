"""Rules of ops that move elements and change no value: run on labels, they give the labels of their result."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from corp_deploy.traced.programs.program import RUN, SAME, SHAPED, operation

from .flow import Call, Flow, Value
from .labels import LabelTensor, label_tensor, tidy, varying


def move(flow: Flow, call: Call) -> Any:
    """Run the op on labels in place of its tensors, and return the labels of its results."""
    why = next((each.why for each in call.tensors if each.why), "")
    if all(each.is_fixed for each in call.tensors):
        return unlabelled(call.shape, why)
    if call.op in SAME | SHAPED:
        return label_tensor(flow.elements(call.tensors[0], call.node).reshape(call.shape), why)
    labels: dict[fx.Node, Tensor] = {}

    def entering(node: fx.Node) -> Any:
        value = call.values[node]
        return labels.setdefault(node, flow.elements(value, call.node)) if isinstance(value, LabelTensor) else value

    assert callable(call.node.target), call.node
    result = call.node.target(*fx.map_arg(call.node.args, entering), **fx.map_arg(call.node.kwargs, entering))
    return (
        tuple(label_tensor(each, why) for each in result)
        if isinstance(result, list | tuple)
        else label_tensor(result, why)
    )


def concatenate(flow: Flow, call: Call) -> Any:
    """Run cat or stack on labels, and join labels of different parts at equal places along the other axes."""
    result = move(flow, call)
    if result.labels is None:
        return result
    dim = call["dim"] % len(result.shape)
    sizes = [each.shape[dim] if call.op.startswith("cat") else 1 for each in call["tensors"]]
    parts = [tidy(each) for each in result.labels.split(sizes, dim) if each.numel()]
    moving = [() if each is None else varying(each) for each in parts]
    why = f"{call.where} puts it beside elements that stay"
    labelled = [
        (each, dims) for each, dims in zip(parts, moving, strict=True) if each is not None and set(dims) - {dim}
    ]
    # Labels that vary along the parts' axis last, as dimensions of heads do, are removed in each part by itself.
    fine = [each for each, dims in labelled if dim == dims[-1]]
    coarse = [each for each, dims in labelled if dim != dims[-1]]
    for each in coarse:
        flow.join(coarse[0].narrow(dim, 0, 1), each, why)
        if None in parts:
            flow.stay(each, why)
    for each in fine:
        if coarse:
            flow.hold(coarse[0].narrow(dim, 0, 1), each)
        if None in parts:
            flow.guard(each.movedim(dim, -1), each.dim() - 1, why)
    return flow.renewed(result)


def scatter(flow: Flow, call: Call) -> Any:
    """Run select_scatter or slice_scatter on labels, and join labels along the axis of the scattered part."""
    result = move(flow, call)
    if result.labels is not None and set(result.dims) - {dim := call["dim"] % len(result.shape)}:
        flow.join(result.labels.narrow(dim, 0, 1), result.labels, f"{call.where} puts it beside elements that stay")
    return flow.renewed(result)


def pad(flow: Flow, call: Call) -> Value:
    """Pad labels; elements added along an axis that labels don't vary along get the labels beside them."""
    first, pad = call["self"], list(call["pad"])
    if first.is_fixed:
        return LabelTensor(call.shape, None, first.why)
    labels = flow.elements(first, call.node)
    rank = len(first.shape)
    dims = [rank - 1 - place // 2 for place, amount in enumerate(pad) if amount]
    for dim in dims:
        if labels.stride(dim) == 0 or labels.shape[dim] == 1:
            labels = labels.narrow(dim, 0, 1)
    pad = [0 if labels.shape[rank - 1 - place // 2] == 1 else amount for place, amount in enumerate(pad)]
    if any(pad):
        labels = torch.constant_pad_nd(labels, pad, -1)
    return label_tensor(labels.expand(call.shape), f"{call.where} adds elements")


def take_by_index(flow: Flow, call: Call) -> Value:
    """Run index, index_select or gather along axes without labels, where the index doesn't matter.

    Along axes with labels the index matters but is unknown on the meta device, so all labels stay.
    """
    first = call["self"]
    if not isinstance(first, LabelTensor) or first.is_fixed:
        return unlabelled(call.shape, first.why)
    labels, rank = flow.elements(first, call.node), len(first.shape)
    indices = dict(enumerate(call["indices"])) if call.op == "index" else {call["dim"] % rank: call["index"]}
    numbers = {dim: torch.zeros(each.shape, dtype=torch.long) for dim, each in indices.items() if each is not None}
    if set(numbers) & set(varying(labels)):
        return stop_labels(flow, call)
    if call.op == "gather":
        return label_tensor(labels.gather(*next(iter(numbers.items()))), first.why)
    return label_tensor(labels[tuple(numbers.get(dim, slice(None)) for dim in range(max(numbers) + 1))], first.why)


def overwrite(flow: Flow, call: Call) -> Value:
    """Return the labels of the tensor that `copy` writes over another one."""
    labels = flow.elements(call["src"], call.node)
    return label_tensor(labels.broadcast_to(call.shape), call["src"].why)


def fill(flow: Flow, call: Call) -> Any:
    """Return a value without labels for a tensor that new_zeros or the like creates."""
    return unlabelled(call.shape, f"it comes from {call.where}")


def pick_item(flow: Flow, call: Call) -> Any:
    return call["0"][call["1"]]


def unlabelled(shape: Any, why: str) -> Any:
    """Build a value without labels of one shape, or a tuple of such values for several shapes."""
    if shape is None:
        return None
    if shape and isinstance(shape[0], tuple | type(None)):
        return tuple(unlabelled(each, why) for each in shape)
    return LabelTensor(tuple(shape), None, why)


def stop_labels(flow: Flow, call: Call) -> Any:
    """Let the labels of all inputs stay, and give none to the result."""
    why = f"{call.where} needs all of it"
    for each in call.tensors:
        flow.stay(each.labels, why)
    return unlabelled(call.shape, f"it comes from {call.where}")


def is_move(node: fx.Node) -> bool:
    """Check that a call only moves the elements of its first argument."""
    is_first = bool(node.all_input_nodes) and node.args[0] is node.all_input_nodes[0]
    return is_first and operation(node) in RUN | SAME | SHAPED | {"getitem"}


def path_to(node: fx.Node, passes: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Follow first inputs back while nodes pass, and return the path from the first that doesn't to the node."""
    path = [node]
    while passes(path[0]):
        path.insert(0, path[0].all_input_nodes[0])
    return path


def axis_order(numbers: Tensor, shape: tuple[int, ...], dim: int) -> Tensor | None:
    """Return moved numbers along axis `dim`; None if moves changed more of a tensor of `shape` than this order."""
    others = [size for place, size in enumerate(shape) if place != dim]
    if numbers.dim() != len(shape) or [size for place, size in enumerate(numbers.shape) if place != dim] != others:
        return None
    lines = numbers.movedim(dim, 0).reshape(numbers.shape[dim], -1)
    return lines[:, 0] if torch.equal(lines, lines[:, :1].expand_as(lines)) else None


def source_of_moves(node: fx.Node) -> fx.Node:
    """Follow first inputs back past moves and scalings by one number, and return the first node that is neither."""

    def is_passed(each: fx.Node) -> bool:
        return is_move(each) or (operation(each) in ("mul", "div") and isinstance(each.args[1], int | float))

    return path_to(node, is_passed)[0]
