"""Mixing: what makes an axis one lump, as a norm or softmax along it does; and sums over axes, which add it up."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .flow import Call, Flow
from .labels import LabelTensor, marked
from .moves import fixed
from .pointwise import channelwise, pointwise


def over(flow: Flow, call: Call) -> Any:
    """Along the axes of `dim`, or all; the larger of two tensors is element by element."""
    if torch.Tag.pointwise in call.node.target.tags:  # type: ignore[union-attr]
        return pointwise(flow, call)
    first, along = call.tensors[0], call["dim"]
    dims = range(len(first.shape)) if along in (None, [], ()) else [along] if isinstance(along, int) else along
    return mixed(flow, call, first, dims)


def of_maps(flow: Flow, call: Call) -> Any:
    """Pools and resizing: along the axes behind the second one."""
    first = call.tensors[0]
    return mixed(flow, call, first, range(2, len(first.shape)))


def last_axes(flow: Flow, call: Call) -> Any:
    """Norms of layers: along the last axes, as many as `normalized_shape` has; one takes channels in any order."""
    if flow.keeps_all and len(call["normalized_shape"]) == 1:
        return channelwise(flow, call, axis=len(call.tensors[0].shape) - 1)
    return mixed(flow, call, call.tensors[0], range(-len(call["normalized_shape"]), 0))


def mixed(flow: Flow, call: Call, first: LabelTensor, dims: Sequence[int]) -> Any:
    """One lump along some axes, what the labels vary along besides stays apart."""
    why, among = f"{call.where} mixes it", sorted({dim % len(first.shape) for dim in dims})
    if first.labels is None or not set(first.dims) - set(among):
        flow.stay(first.labels, why)
        return fixed(call.shape, (first.labels is None and first.why) or f"it comes from {call.where}")
    return _spread(flow.lump(first.labels, among, why), among, call.shape, why)


def _spread(small: Tensor, dims: Sequence[int], shape: Any, why: str) -> Any:
    """Labels of size 1 along the axes that were mixed, as every result has them."""
    if shape and isinstance(shape[0], tuple):
        return tuple(_spread(small, dims, each, why) for each in shape)
    if len(shape) < small.dim():
        small = small.reshape([size for dim, size in enumerate(small.shape) if dim not in dims])
    return marked(small.expand(shape), why)


def group_norm(flow: Flow, call: Call) -> Any:
    """One lump a group: of one channel each it is channel by channel."""
    first = call["input"]
    groups, channels = call["num_groups"], first.shape[1]
    if first.labels is None or 1 not in first.dims or groups == 1:
        return mixed(flow, call, first, range(1, len(first.shape)))
    if set(first.dims) != {1}:
        return mixed(flow, call, first, range(len(first.shape)))
    if groups != channels:
        by_group = first.labels.narrow(0, 0, 1).movedim(1, -1).unflatten(-1, (groups, -1))
        flow.lump(by_group, (-1,), f"{call.where} mixes it")
    return channelwise(flow, call)


def instance_norm(flow: Flow, call: Call) -> Any:
    """Each channel by itself."""
    first = call["input"]
    return mixed(flow, call, first, range(2, len(first.shape))) if set(first.dims) - {1} else channelwise(flow, call)


def native_batch_norm(flow: Flow, call: Call) -> Any:
    """One that gives its statistics too, which are none in eval."""
    first, *statistics = fixed(call.shape, "")
    return channelwise(flow, call.giving(first.shape)), *statistics


def patches(flow: Flow, call: Call) -> Any:
    """im2col [B, C x places, patches] of maps [B, C, ...], and col2im back: the places of every channel."""
    first, is_back = call["self"], call.op == "col2im"
    if first.labels is None or set(first.dims) != {1}:
        return mixed(flow, call, first, range(len(first.shape)))
    labels = flow.across(first, (1,), call.where)
    if is_back:
        by_channel = labels.reshape(call.shape[1], -1)
        labels = flow.lump(by_channel, (1,), f"{call.where} adds it up").reshape(-1)
    else:
        labels = labels.repeat_interleave(call.shape[1] // first.shape[1])
    return marked(labels.reshape(1, -1, *[1] * (len(call.shape) - 2)).expand(call.shape), first.why)
