"""Layers: contractions with a parameter, over features or over places of a map, and tables."""

import torch

from .call import Call, Value
from .flow import Flow, Hearing
from .marks import Marks, marked
from .moves import fixed, stopped
from .product import columns_stay, factor, product, write

_FRONT = "abcdefghijklmn"
_KERNEL = "XYZ"


def linear(flow: Flow, call: Call) -> Value:
    """input [..., K], weight [N, K]"""
    front = _FRONT[: len(call["input"].shape) - 1]
    if not call["weight"].constant:
        return stopped(flow, call)
    given = product(flow, call, factor(call, "input", f"{front}K"), factor(call, "weight", "NK"), f"{front}N")
    return biased(flow, call, given, len(given.shape) - 1)


def biased(flow: Flow, call: Call, given: Marks, dim: int) -> Value:
    """A bias goes with the rows."""
    bias = call["bias"]
    if isinstance(bias, Marks) and dim in given.dims:
        rows = flow.across(given, (dim,), f"{call.where} adds a bias")
        if bias.constant:
            flow.touch(call.node, bias.constant, (0,), rows, "writes")
        else:
            flow.stay(rows, f"{call.where} adds a computed bias")
            flow.stay(bias.labels, f"{call.where} adds it as a bias")
    return given


def convolution(flow: Flow, call: Call) -> Value:
    """input [B, C, ...], weight [O, C / groups, ...]; a transposed one has weight [C, O, ...]."""
    first, weight, groups = call["input"], call["weight"], call["groups"]
    is_transposed, places = "transpose" in call.op, _FRONT[: len(first.shape) - 2]
    odd = len(first.shape) != len(weight.shape) or (first.dims and 1 not in first.dims)
    if not weight.constant or odd or (is_transposed and groups > 1):
        return stopped(flow, call)
    if groups == first.shape[1] > 1:
        return _depthwise(flow, call, first, weight)
    if groups > 1:
        return _in_groups(flow, call, first, weight, groups)
    letters = ("CO" if is_transposed else "OC") + _KERNEL[: len(places)]
    given = product(flow, call, factor(call, "input", f"NC{places}"), factor(call, "weight", letters), f"NO{places}")
    return biased(flow, call, given, 1)


def _depthwise(flow: Flow, call: Call, first: Marks, weight: Marks) -> Value:
    """Each channel by itself, one or several for it."""
    if first.labels is None:
        return fixed(call.shape, first.why)
    channels_C = flow.across(first, (1,), f"{call.where} convolves each channel")
    rows_O = channels_C.repeat_interleave(weight.shape[0] // first.shape[1])
    flow.touch(call.node, weight.constant, (0,), rows_O, "between")
    return biased(flow, call, _channels(rows_O, call.shape, first.why), 1)


def _in_groups(flow: Flow, call: Call, first: Marks, weight: Marks, groups: int) -> Value:
    """Each group of rows [O / groups] has columns of its own [C / groups]; as many are left of each."""
    columns, why = weight.shape[1], f"{call.where} works in groups"
    source, kernel = call.node_of("input"), factor(call, "weight", "OC" + _KERNEL[: len(weight.shape) - 2])
    assert source is not None
    if first.labels is not None:
        beside = f"{call.where} reads it together with what stays"
        ids = flow.axis(weight.constant, (0, 1), (groups, columns))
        flow.join(ids, flow.across(first, (1,), beside).reshape(groups, columns), beside)
        of_rows = ids.unsqueeze(1).expand(groups, weight.shape[0] // groups, columns).reshape(-1, columns)
        flow.touch(call.node, weight.constant, (0, 1), of_rows, "reads")
        flow.guard(ids, 1, why)
        labels = ids.reshape(-1)
        flow.hear(Hearing(reader=call.node, source=source, axes=(1,), labels=labels, is_bilinear=False))
    rows_O = write(flow, call, kernel, "O")
    flow.guard(rows_O.reshape(groups, -1), 1, why)
    return biased(flow, call, _channels(rows_O, call.shape, ""), 1)


def _channels(labels: torch.Tensor, shape: tuple[int, ...], why: str) -> Marks:
    return marked(labels.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape), why)


def embedding(flow: Flow, call: Call) -> Value:
    """weight [V, C]: columns of a table are written, its rows are looked up by number."""
    weight = factor(call, "weight", "VC")
    if not weight.marks.constant:
        return stopped(flow, call)
    columns_stay(flow, weight, "V", "a table is looked up by number")
    return marked(torch.broadcast_to(write(flow, call, weight, "C"), call.shape))
