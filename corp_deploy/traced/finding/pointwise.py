"""Rules of ops that work element by element or channel by channel, and of ops that mix all elements of an axis."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .flow import Call, Flow, Value
from .labels import LabelTensor, label_tensor
from .moves import unlabelled

UNTAGGED, SUMS, PRODUCTS = (
    frozenset(ops.split())
    for ops in (
        # ops that work element by element without torch's tag for it
        """__and__ __or__ divide floor_divide full_like hardswish log_sigmoid multiply ones_like special_erf subtract
        threshold true_divide zeros_like""",
        "add add_ sub sub_ subtract rsub addcmul lerp",
        "mul mul_ multiply div div_ divide",
    )
)


def is_pointwise(target: Any) -> bool:
    """Check whether an op works element by element, by torch's tag of it or its out-of-place twin, or by UNTAGGED."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name, overload = target._schema.name.removeprefix("aten::").removesuffix("_"), target._overloadname
    plain = getattr(getattr(torch.ops.aten, name, None), overload, target)
    return name in UNTAGGED or torch.Tag.pointwise in (*target.tags, *plain.tags)


def join_elementwise(flow: Flow, call: Call, tensors: Sequence[LabelTensor] = ()) -> Value:
    """Join labels element by element, axes of size 1 broadcast; constants get the labels of what they combine with."""
    tensors = tensors or call.tensors
    spread = [_aligned(each, len(call.shape)) for each in tensors]
    labelled = [each for each in spread if each.labels is not None]
    if not labelled:
        return unlabelled(call.shape, next((each.why for each in spread if each.why), f"it comes from {call.where}"))
    for one, other in combinations([each for each in spread if not each.constant], 2):
        _meet(flow, call, one, other)
    # The result gets the labels that vary along the most axes: held labels rather than their holders.
    first = max(labelled, key=lambda each: len(each.dims))
    assert first.labels is not None, call.node
    for each in tensors:
        missing = len(call.shape) - len(each.shape)
        axes = [dim - missing for dim in first.dims if dim >= missing and each.shape[dim - missing] > 1]
        if each.constant and len(axes) == len(first.dims):  # such as a bias or a layer scale
            labels = flow.across(first, first.dims, f"{call.where} has an element for each")
            flow.use(call.node, each.constant, tuple(axes), labels, "between")
    return label_tensor(first.labels.expand(call.shape), first.why)


def _aligned(marks: LabelTensor, rank: int) -> LabelTensor:
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
            flow.stay(one.labels, call.because("combines it with", other))
    elif set(other.dims) - set(one.dims):
        flow.stay(other.labels, f"{call.where} crosses two axes")
    elif lacking and is_spread and one.dims[-1] in lacking:
        flow.hold(other.labels, one.labels)
    else:
        flow.join(one.labels, other.labels, f"{call.where} combines it with elements that stay")
        if call.op in SUMS:
            flow.added.append(one.labels)
        if call.op in PRODUCTS and one.shape == other.shape:
            flow.multiplied.append(one.labels)


def gate(flow: Flow, call: Call) -> Value:
    """Join the halves of an axis that glu multiplies element by element."""
    first, dim = call["self"], call["dim"]
    if first.labels is None:
        return unlabelled(call.shape, first.why)
    one, other = first.labels.chunk(2, dim)
    flow.join(one, other, f"{call.where} combines it with elements that stay")
    flow.multiplied.append(one)
    return label_tensor(one, first.why)


def channelwise(flow: Flow, call: Call, axis: int = 1) -> Value:
    """Let labels pass batch_norm, prelu and the like, which have parameters for each channel of an axis."""
    first = call.tensors[0]
    if first.labels is None:
        return unlabelled(call.shape, first.why)
    if axis in first.dims:
        channels_C = flow.across(first, (axis,), f"{call.where} has a parameter for each channel")
        for marks in call.tensors[1:]:
            if marks.constant and marks.shape == tuple(channels_C.shape):
                flow.use(call.node, marks.constant, (0,), channels_C, "between")
            elif marks.shape == tuple(channels_C.shape):
                flow.stay(channels_C, f"{call.where} has computed parameters")
    return label_tensor(first.labels, first.why)


def reduce_axes(flow: Flow, call: Call) -> Any:
    """Mix along the axes of `dim`, or all; max and min of two tensors work element by element."""
    if torch.Tag.pointwise in call.node.target.tags:  # type: ignore[union-attr]
        return join_elementwise(flow, call)
    first, along = call.tensors[0], call["dim"]
    dims = range(len(first.shape)) if along in (None, [], ()) else [along] if isinstance(along, int) else along
    return mix(flow, call, first, dims)


def pool_maps(flow: Flow, call: Call) -> Any:
    """Mix the places of maps, the axes after the second one, as pooling and resizing do."""
    first = call.tensors[0]
    return mix(flow, call, first, range(2, len(first.shape)))


def normalize_last_axes(flow: Flow, call: Call) -> Any:
    """Mix the last axes, as many as `normalized_shape` has; if elements are only reordered, one axis isn't mixed."""
    if flow.keeps_all and len(call["normalized_shape"]) == 1:
        return channelwise(flow, call, axis=len(call.tensors[0].shape) - 1)
    return mix(flow, call, call.tensors[0], range(-len(call["normalized_shape"]), 0))


def mix(flow: Flow, call: Call, first: LabelTensor, dims: Sequence[int]) -> Any:
    """Join labels along the axes `dims`; if they vary along no other axis, let all stay and return none."""
    why, among = f"{call.where} mixes it", sorted({dim % len(first.shape) for dim in dims})
    if first.labels is None or not set(first.dims) - set(among):
        flow.stay(first.labels, why)
        return unlabelled(call.shape, (first.labels is None and first.why) or f"it comes from {call.where}")
    return _expand_mixed(flow.lump(first.labels, among, why), among, call.shape, why)


def _expand_mixed(small: Tensor, dims: Sequence[int], shape: Any, why: str) -> Any:
    """Expand labels of size 1 along mixed axes to the shape of each result."""
    if shape and isinstance(shape[0], tuple):
        return tuple(_expand_mixed(small, dims, each, why) for each in shape)
    if len(shape) < small.dim():
        small = small.reshape([size for dim, size in enumerate(small.shape) if dim not in dims])
    return label_tensor(small.expand(shape), why)


def group_norm(flow: Flow, call: Call) -> Any:
    """Join the channels of each group; groups of one channel leave channels apart."""
    first = call["input"]
    groups, channels = call["num_groups"], first.shape[1]
    if first.labels is None or 1 not in first.dims or groups == 1:
        return mix(flow, call, first, range(1, len(first.shape)))
    if set(first.dims) != {1}:
        return mix(flow, call, first, range(len(first.shape)))
    if groups != channels:
        by_group = first.labels.narrow(0, 0, 1).movedim(1, -1).unflatten(-1, (groups, -1))
        flow.lump(by_group, (-1,), f"{call.where} mixes it")
    return channelwise(flow, call)


def instance_norm(flow: Flow, call: Call) -> Any:
    """Let each channel pass by itself."""
    first = call["input"]
    return mix(flow, call, first, range(2, len(first.shape))) if set(first.dims) - {1} else channelwise(flow, call)


def native_batch_norm(flow: Flow, call: Call) -> Any:
    """Let channels pass a batch norm that also gives statistics, which are empty in eval mode."""
    first, *statistics = unlabelled(call.shape, "")
    return channelwise(flow, replace(call, shape=first.shape)), *statistics


def patches(flow: Flow, call: Call) -> Any:
    """Run im2col from maps [B, C, ...] to [B, C x places, patches], or col2im back, channel by channel."""
    first = call["self"]
    if first.labels is None or set(first.dims) != {1}:
        return mix(flow, call, first, range(len(first.shape)))
    labels = flow.across(first, (1,), call.where)
    if call.op == "col2im":
        labels = flow.lump(labels.reshape(call.shape[1], -1), (1,), f"{call.where} adds it up").reshape(-1)
    else:
        labels = labels.repeat_interleave(call.shape[1] // first.shape[1])
    return by_channel(labels, call.shape, first.why)


def by_channel(labels: Tensor, shape: tuple[int, ...], why: str) -> LabelTensor:
    """Expand labels [C] to maps [B, C, ...]."""
    return label_tensor(labels.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape), why)
