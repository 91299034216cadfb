"""Element by element: labels that meet are one. And channel by channel: norms in eval, with a parameter an element."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from .flow import Call, Flow, Value
from .labels import LabelTensor, marked
from .moves import fixed

UNTAGGED, SUMS, PRODUCTS = (
    frozenset(ops.split())
    for ops in (
        # of which torch doesn't say that they work element by element
        """__and__ __or__ divide floor_divide full_like hardswish log_sigmoid multiply ones_like special_erf subtract
        threshold true_divide zeros_like""",
        "add add_ sub sub_ subtract rsub addcmul lerp",
        "mul mul_ multiply div div_ divide",
    )
)


def is_pointwise(target: Any) -> bool:
    """Whether torch says so of an op, or of the one that does the same not in place."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name, overload = target._schema.name.removeprefix("aten::").removesuffix("_"), target._overloadname
    plain = getattr(getattr(torch.ops.aten, name, None), overload, target)
    return name in UNTAGGED or torch.Tag.pointwise in (*target.tags, *plain.tags)


def pointwise(flow: Flow, call: Call) -> Value:
    """Labels as they meet, with axes of size 1 spread out; constants go along with whatever they meet."""
    return combined(flow, call, call.tensors)


def combined(flow: Flow, call: Call, tensors: Sequence[LabelTensor]) -> Value:
    """Of tensors that are taken together element by element."""
    spread = [_aligned(each, len(call.shape)) for each in tensors]
    labelled = [each for each in spread if each.labels is not None]
    if not labelled:
        return fixed(call.shape, next((each.why for each in spread if each.why), f"it comes from {call.where}"))
    for one, other in combinations([each for each in spread if not each.constant], 2):
        _meet(flow, call, one, other)
    # Of labels that hold others, and of those along another axis, the finer and the first ones go on.
    first = max(labelled, key=lambda each: len(each.dims))
    assert first.labels is not None, call.node
    for each in tensors:
        if each.constant:
            _go_along(flow, call, each, first)
    return marked(first.labels.expand(call.shape), first.why)


def _go_along(flow: Flow, call: Call, constant: LabelTensor, first: LabelTensor) -> None:
    """A constant with an element for each label, as a bias or a layer scale has."""
    missing = len(call.shape) - len(constant.shape)
    axes = [dim - missing for dim in first.dims if dim >= missing and constant.shape[dim - missing] > 1]
    if len(axes) == len(first.dims):
        labels = flow.across(first, first.dims, f"{call.where} has an element for each")
        flow.use(call.node, constant.constant, tuple(axes), labels, "between")


def _aligned(marks: LabelTensor, rank: int) -> LabelTensor:
    """With axes of size 1 in front."""
    missing = rank - len(marks.shape)
    shape = (1,) * missing + marks.shape
    labels = None if marks.labels is None else marks.labels.reshape(shape) if missing else marks.labels
    return LabelTensor(shape, labels, marks.why, marks.constant)


def _meet(flow: Flow, call: Call, one: LabelTensor, other: LabelTensor) -> None:
    if len(one.dims) < len(other.dims):
        one, other = other, one
    if one.labels is None:
        return
    lacking = [dim for dim in one.dims if dim not in other.dims]
    is_spread = all(other.shape[dim] == 1 for dim in lacking)
    if other.labels is None:
        if not is_spread:
            flow.stay(one.labels, call.because("takes it together with", other))
    elif set(other.dims) - set(one.dims):
        flow.stay(other.labels, f"{call.where} crosses two axes")
    elif lacking and is_spread and one.dims[-1] in lacking:
        flow.hold(other.labels, one.labels)
    else:
        flow.join(one.labels, other.labels, f"{call.where} takes it together with what stays")
        if call.op in SUMS:
            flow.added.append(one.labels)
        if call.op in PRODUCTS and one.shape == other.shape:
            flow.multiplied.append(one.labels)


def gated(flow: Flow, call: Call) -> Value:
    """glu: the first half of an axis times a sigmoid of the other, pair by pair."""
    first, dim = call["self"], call["dim"]
    if first.labels is None:
        return fixed(call.shape, first.why)
    one, other = first.labels.chunk(2, dim)
    flow.join(one, other, f"{call.where} takes it together with what stays")
    flow.multiplied.append(one)
    return marked(one, first.why)


def channelwise(flow: Flow, call: Call, axis: int = 1) -> Value:
    """batch_norm, prelu and norms of each channel: along the second axis or another, with parameters by
    channel.
    """
    first = call.tensors[0]
    if first.labels is None:
        return fixed(call.shape, first.why)
    if axis in first.dims:
        channels_C = flow.across(first, (axis,), f"{call.where} has a parameter for each channel")
        for marks in call.tensors[1:]:
            if marks.constant and marks.shape == tuple(channels_C.shape):
                flow.use(call.node, marks.constant, (0,), channels_C, "between")
            elif marks.shape == tuple(channels_C.shape):
                flow.stay(channels_C, f"{call.where} has computed parameters")
    return marked(first.labels, first.why)
