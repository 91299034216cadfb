"""A walk through a program, op by op, with the table of rules of what an op does to labels.

An op without a rule stops labels, which is always safe. This file has the rules of contractions: layers with a weight,
products of activations, and lookups in tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from corp_deploy.traced.programs.program import RUN, SAME, SHAPED, Program, count_uses, operation, sizes_at_one

from . import moves, pointwise
from .flow import Call, Flow, Value, make_call
from .labels import LabelTensor, label_tensor
from .moves import stop_labels, unlabelled
from .pointwise import by_channel, join_elementwise, mix
from .product import FRONT, Factor, argument_factor, equation_of, keep_columns, multiply, write_rows

_KERNEL = "XYZ"


def contraction(flow: Flow, call: Call) -> Value:
    """Apply the rule of linear, matmul and einsum by letters; addmm adds a bias if that is a constant of one axis."""
    equation, bias = equation_of(call.node), call["bias"] if call.op == "linear" else None
    if equation is None or (call.op == "linear" and not call["weight"].constant):
        return stop_labels(flow, call)
    one, other = (
        Factor(node=node, marks=call.values[node], letters=letters)
        for node, letters in zip(equation.nodes, equation.letters, strict=True)
    )
    result = multiply(flow, call, one, other, equation.out)
    if call.op in ("addmm", "baddbmm"):
        bias = call["self"]
        if not bias.constant or len(bias.shape) > 1:
            return join_elementwise(flow, call, [result, bias])
    return add_bias(flow, call, result, bias, len(result.shape) - 1)


def add_bias(flow: Flow, call: Call, result: LabelTensor, bias: LabelTensor | None, dim: int) -> Value:
    """Let a constant bias lose the elements of removed rows, and rows with a computed bias stay; return `result`."""
    if bias is not None and dim in result.dims:
        rows = flow.across(result, (dim,), f"{call.where} adds a bias")
        if bias.constant:
            flow.use(call.node, bias.constant, (0,), rows, "writes")
        else:
            flow.stay(rows, f"{call.where} adds a computed bias")
            flow.stay(bias.labels, f"{call.where} adds it as a bias")
    return result


def convolution(flow: Flow, call: Call) -> Value:
    """Apply the rule of input [B, C, ...] and weight [O, C / groups, ...], or [C, O, ...] if transposed."""
    first, weight, groups = call["input"], call["weight"], call["groups"]
    is_transposed, places = "transpose" in call.op, FRONT[: len(first.shape) - 2]
    odd = len(first.shape) != len(weight.shape) or (first.dims and 1 not in first.dims)
    if not weight.constant or odd or (is_transposed and groups > 1):
        return stop_labels(flow, call)
    if groups == first.shape[1] > 1:
        return _depthwise(flow, call, first, weight)
    if groups > 1:
        return _in_groups(flow, call, first, weight, groups)
    letters = ("CO" if is_transposed else "OC") + _KERNEL[: len(places)]
    one, other = argument_factor(call, "input", f"NC{places}"), argument_factor(call, "weight", letters)
    result = multiply(flow, call, one, other, f"NO{places}")
    return add_bias(flow, call, result, call["bias"], 1)


def _depthwise(flow: Flow, call: Call, first: LabelTensor, weight: LabelTensor) -> Value:
    """Let each channel give one or several channels by itself."""
    if first.labels is None:
        return unlabelled(call.shape, first.why)
    channels_C = flow.across(first, (1,), f"{call.where} convolves each channel")
    rows_O = channels_C.repeat_interleave(weight.shape[0] // first.shape[1])
    flow.use(call.node, weight.constant, (0,), rows_O, "between")
    return add_bias(flow, call, by_channel(rows_O, call.shape, first.why), call["bias"], 1)


def _in_groups(flow: Flow, call: Call, first: LabelTensor, weight: LabelTensor, groups: int) -> Value:
    """Let each group of rows [O / groups] read its own columns [C / groups], and keep some rows and columns."""
    columns, why = weight.shape[1], f"{call.where} works in groups"
    source, kernel = call.arguments["input"], argument_factor(call, "weight", "OC" + _KERNEL[: len(weight.shape) - 2])
    if first.labels is not None:
        beside = f"{call.where} reads it together with elements that stay"
        ids = flow.axis(weight.constant, (0, 1), (groups, columns))
        flow.join(ids, flow.across(first, (1,), beside).reshape(groups, columns), beside)
        of_rows = ids.unsqueeze(1).expand(groups, weight.shape[0] // groups, columns).reshape(-1, columns)
        flow.use(call.node, weight.constant, (0, 1), of_rows, "reads")
        flow.guard(ids, 1, why)
        flow.use(call.node, source.name, (1,), ids.reshape(-1), "sums")
    rows_O = write_rows(flow, call, kernel, "O")
    flow.guard(rows_O.reshape(groups, -1), 1, why)
    return add_bias(flow, call, by_channel(rows_O, call.shape, ""), call["bias"], 1)


def embedding(flow: Flow, call: Call) -> Value:
    """Label the columns of a table [V, C], whose rows are looked up by id, as channels that this node writes."""
    weight = argument_factor(call, "weight", "VC")
    if not weight.marks.constant:
        return stop_labels(flow, call)
    keep_columns(flow, weight, "V", "a table is looked up by number")
    return label_tensor(torch.broadcast_to(write_rows(flow, call, weight, "C"), call.shape))


def attention(flow: Flow, call: Call) -> Value:
    """Apply the rule of queries [..., H, L, E], keys [..., H, S, E] and values [..., H, S, V], with a mask added.

    Grouped queries share keys.
    """
    query, key, value = (call[name] for name in ("query", "key", "value"))
    queries, keys, values = (call.arguments[name] for name in ("query", "key", "value"))
    times = query.shape[-3] // key.shape[-3] if call["enable_gqa"] else 1
    key, value = _repeated(key, times), _repeated(value, times)
    front = FRONT[: len(query.shape) - 2]
    part = replace(call, shape=(*call.shape[:-1], key.shape[-2]))
    one = Factor(node=queries, marks=query, letters=f"{front}LE")
    scores = multiply(flow, part, one, Factor(node=keys, marks=key, letters=f"{front}SE"), f"{front}LS")
    uses = flow.uses.get(call.node, [])
    if times > 1 and uses and uses[-1].name == keys.name:
        uses[-1] = replace(uses[-1], labels=uses[-1].labels[..., ::times, :])
    mask = call["attn_mask"]
    if isinstance(mask, LabelTensor) and not mask.constant and mask.shape[-3:-2] in ((), (1,)):
        flow.stay(mask.labels, f"{call.where} applies it to all heads")
    elif isinstance(mask, LabelTensor):
        scores = join_elementwise(flow, part, [scores, mask])
    weights = Factor(node=call.node, marks=mix(flow, part, scores, (-1,)), letters=f"{front}LS")
    return multiply(flow, call, weights, Factor(node=values, marks=value, letters=f"{front}SV"), f"{front}LV")


def _repeated(marks: LabelTensor, times: int) -> LabelTensor:
    if times == 1:
        return marks
    if marks.labels is not None:
        return label_tensor(marks.labels.repeat_interleave(times, -3))
    return replace(marks, shape=(*marks.shape[:-3], marks.shape[-3] * times, *marks.shape[-2:]))


Rule = Callable[[Flow, Call], Any]
_BY_RULE: tuple[tuple[Rule, str], ...] = (
    (moves.move, " ".join(SAME | SHAPED | RUN)),
    (moves.concatenate, "cat concat stack"),
    (moves.scatter, "select_scatter slice_scatter"),
    (moves.pad, "pad constant_pad_nd"),
    (moves.take_by_index, "index index_select gather"),
    (moves.overwrite, "copy"),
    (moves.fill, "new_zeros new_ones new_full new_empty"),
    (moves.pick_item, "getitem"),
    (pointwise.channelwise, "batch_norm prelu"),
    (pointwise.gate, "glu"),
    (
        pointwise.reduce_axes,
        """_log_softmax _softmax all amax amin any argmax argmin argsort count_nonzero cumprod cumsum kthvalue
        linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median min nanmean norm prod softmax softmin
        sort std std_mean sum topk var var_mean""",
    ),
    (
        pointwise.pool_maps,
        """_adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
        max_pool2d_with_indices grid_sampler upsample_bicubic2d upsample_bilinear2d upsample_linear1d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa upsample_nearest_exact2d _upsample_nearest_exact2d""",
    ),
    (pointwise.normalize_last_axes, "layer_norm native_layer_norm rms_norm"),
    (pointwise.group_norm, "group_norm"),
    (pointwise.instance_norm, "instance_norm"),
    (pointwise.native_batch_norm, "_native_batch_norm_legit_no_training"),
    (pointwise.patches, "im2col col2im"),
    (contraction, "linear matmul mm bmm addmm baddbmm einsum"),
    (convolution, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    (attention, "scaled_dot_product_attention"),
    (embedding, "embedding"),
)
RULES: Mapping[str, Rule] = {op: rule for rule, ops in _BY_RULE for op in ops.split()}
"""The rules by the ops' names in ATen; torch's tags tell which other ops work element by element."""


def walk_program(program: Program, *, keeps_all: bool = False) -> Flow:
    """Let the labels of all weights flow through the program in order; return the Flow. `keeps_all`: see Flow."""
    flow = Flow(program=program, keeps_all=keeps_all, times_used=count_uses(program))
    for node in program.nodes:
        if node.op == "output":
            for source in node.all_input_nodes:
                value = flow.values[source]
                flow.stay(value.labels if isinstance(value, LabelTensor) else None, "it is an output of the model")
        else:
            flow.values[node] = evaluate_node(flow, node)
    flow.values = {node: flow.renewed(value) for node, value in flow.values.items()}
    return flow


def evaluate_node(flow: Flow, node: fx.Node) -> Any:
    """Apply the rule of a node's op, and return the node's value."""
    if node.op == "get_attr":
        return LabelTensor(tuple(flow.program.tensor(str(node.target)).shape), None, "", str(node.target))
    if node.op == "placeholder":
        shape = sizes_at_one(node)
        return None if shape is None else unlabelled(shape, f"it comes from the model's input {node.name}")
    value = node.meta.get("val")
    if not isinstance(value, Tensor | list | tuple):
        return _number(flow, node)
    for each in node.all_input_nodes:
        flow.values[each] = flow.renewed(flow.values[each])
    call = make_call(node, flow.values)
    rule = RULES.get(call.op) or (pointwise.join_elementwise if pointwise.is_pointwise(node.target) else None)
    if rule is not None:
        return rule(flow, call)
    if any(each.labels is not None for each in call.tensors):
        flow.unknown[call.op] += 1
    return stop_labels(flow, call)


def _number(flow: Flow, node: fx.Node) -> Any:
    if operation(node) == "sym_size":
        first = node.args[0]
        assert isinstance(first, fx.Node)
        return flow.values[first].shape[node.args[1]]
    assert callable(node.target), node
    call = make_call(node, flow.values)
    try:
        return node.target(*call.valued(node.args), **call.valued(node.kwargs))
    except TypeError:
        return None
