"""Mixing: what makes an axis one lump, as a norm or softmax along it does; and sums over axes, which add it up."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call, Part
from .flow import Flow
from .marks import Marks, marked
from .moves import fixed
from .names import named
from .pointwise import channelwise

OVER_DIM = named(
    """
    _log_softmax _softmax all amax amin any argmax argmin argsort count_nonzero cumprod cumsum glu_mixed kthvalue
    linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median min nanmean norm prod softmax softmin sort
    std std_mean sum topk var var_mean
    """
)
POOLS = frozenset(
    f"{name}{rank}d"
    for name in ("adaptive_avg_pool", "adaptive_max_pool", "avg_pool", "max_pool")
    for rank in (1, 2, 3)
) | {"max_pool2d_with_indices", "_adaptive_avg_pool2d"}
RESIZES = named(
    """
    grid_sampler upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_nearest_exact2d
    _upsample_nearest_exact2d
    """
)


def over(flow: Flow, call: Call) -> Any:
    """Along the axes of `dim`, or all."""
    first: Marks = call.tensors[0]
    asked = call["dim"]
    if asked is None and call.op in ("max", "min") and len(call.tensors) == 2:
        asked = ()
    dims = range(len(first.shape)) if asked in (None, [], ()) else [asked] if isinstance(asked, int) else asked
    return mixed(flow, call, first, dims)


def of_maps(flow: Flow, call: Call) -> Any:
    """Along the axes behind the second one."""
    first = call.tensors[0]
    return mixed(flow, call, first, range(2, len(first.shape)))


def last_axes(flow: Flow, call: Call) -> Any:
    """layer_norm, rms_norm: along as many axes as it is said to normalise."""
    first = call.tensors[0]
    return mixed(flow, call, first, range(-len(call["normalized_shape"]), 0))


def mixed(flow: Flow, call: Call, first: Marks, dims: Sequence[int]) -> Any:
    """One lump along some axes, what the labels vary along besides stays apart."""
    why = f"{call.where} mixes it"
    if first.is_fixed or first.labels is None:
        return fixed(call.shape, first.why or f"it comes from {call.where}")
    among = sorted({dim % len(first.shape) for dim in dims})
    if not set(first.dims) - set(among):
        flow.stay(first.labels, why)
        return fixed(call.shape, f"it comes from {call.where}")
    small = flow.lump(first.labels, among, why)
    return _spread(small, among, call.shape, why)


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
        flow.lump(
            first.labels.narrow(0, 0, 1).movedim(1, -1).unflatten(-1, (groups, -1)), (-1,), f"{call.where} mixes it"
        )
    return channelwise(flow, call, ("weight", "bias"))


def with_statistics(rule: Callable[[Flow, Call], Any]) -> Callable[[Flow, Call], Any]:
    """Of a norm that gives its statistics too, which nobody takes in eval."""

    def normed(flow: Flow, call: Call) -> Any:
        first, *others = fixed(call.shape, f"it comes from {call.where}")
        return rule(flow, Part(call.node, call.values, call.arguments, first.shape)), *others

    return normed


def instance_norm(flow: Flow, call: Call) -> Any:
    """Each channel by itself."""
    first = call["input"]
    if set(first.dims) - {1}:
        return mixed(flow, call, first, range(2, len(first.shape)))
    return channelwise(flow, call, ("weight", "bias", "running_mean", "running_var"))


def patches(flow: Flow, call: Call) -> Any:
    """im2col: of every channel its places [B, C x places, patches]."""
    first = call["self"]
    if first.labels is None or set(first.dims) != {1}:
        return mixed(flow, call, first, range(len(first.shape)))
    places = call.shape[1] // first.shape[1]
    channels_C = flow.across(first, (1,), call.where)
    return marked(torch.repeat_interleave(channels_C, places).reshape(1, -1, 1).expand(call.shape), first.why)


def unpatched(flow: Flow, call: Call) -> Any:
    """col2im: the places of every channel are added up."""
    first = call["self"]
    if first.labels is None or set(first.dims) != {1}:
        return mixed(flow, call, first, range(len(first.shape)))
    channels = call.shape[1]
    by_channel = flow.across(first, (1,), call.where).reshape(channels, -1)
    small = flow.lump(by_channel, (1,), f"{call.where} adds it up")
    return marked(small.reshape(1, -1, 1, 1).expand(call.shape), first.why)
