"""A walk through a program, op by op, and its one table: what an op does to labels. An op that isn't in it stops them,
which is always safe.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from corp_deploy.traced.programs.program import RUN, SAME, SHAPED, Program, operation, sizes_at_one, times_used

from . import moves, pointwise
from .contractions import attention, contraction, convolution, embedding
from .flow import Call, Flow, call_of
from .labels import LabelTensor
from .moves import fixed, stopped

Rule = Callable[[Flow, Call], Any]
_BY_RULE: tuple[tuple[Rule, str], ...] = (
    (moves.moved, " ".join(SAME | SHAPED | RUN)),
    (moves.joined, "cat concat stack"),
    (moves.scattered, "select_scatter slice_scatter"),
    (moves.padded, "pad constant_pad_nd"),
    (moves.indexed, "index index_select gather"),
    (moves.replaced, "copy"),
    (moves.filled, "new_zeros new_ones new_full new_empty"),
    (moves.picked, "getitem"),
    (pointwise.channelwise, "batch_norm prelu"),
    (pointwise.gated, "glu"),
    (
        pointwise.over,
        """_log_softmax _softmax all amax amin any argmax argmin argsort count_nonzero cumprod cumsum kthvalue
        linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median min nanmean norm prod softmax softmin
        sort std std_mean sum topk var var_mean""",
    ),
    (
        pointwise.of_maps,
        """_adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
        max_pool2d_with_indices grid_sampler upsample_bicubic2d upsample_bilinear2d upsample_linear1d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa upsample_nearest_exact2d _upsample_nearest_exact2d""",
    ),
    (pointwise.last_axes, "layer_norm native_layer_norm rms_norm"),
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
"""By an op's name in ATen; besides, torch knows what works element by element."""


def walked(program: Program, *, keeps_all: bool = False) -> Flow:
    """All that labels of the program's weights meet, in order of the program; `keeps_all` as Flow's."""
    flow = Flow(program=program, keeps_all=keeps_all, times_used=times_used(program))
    for node in program.nodes:
        if node.op == "output":
            for source in node.all_input_nodes:
                value = flow.values[source]
                flow.stay(value.labels if isinstance(value, LabelTensor) else None, "it is what the model gives")
        else:
            flow.values[node] = value_of(flow, node)
    flow.values = {node: flow.renewed(value) for node, value in flow.values.items()}
    return flow


def value_of(flow: Flow, node: fx.Node) -> Any:
    """What a node gives: Marks, several of them, or a number."""
    if node.op == "get_attr":
        return LabelTensor(tuple(flow.program.tensor(str(node.target)).shape), None, "", str(node.target))
    if node.op == "placeholder":
        shape = sizes_at_one(node)
        return None if shape is None else fixed(shape, f"it comes from the model's input {node.name}")
    value = node.meta.get("val")
    if not isinstance(value, Tensor | list | tuple):
        return _number(flow, node)
    for each in node.all_input_nodes:
        flow.values[each] = flow.renewed(flow.values[each])
    call = call_of(node, flow.values)
    rule = RULES.get(call.op) or (pointwise.combined if pointwise.is_pointwise(node.target) else None)
    if rule is not None:
        return rule(flow, call)
    if any(each.labels is not None for each in call.tensors):
        flow.unknown[call.op] += 1
    return stopped(flow, call)


def _number(flow: Flow, node: fx.Node) -> Any:
    """Sizes and what is computed of them, at a batch of 1."""
    if operation(node) == "sym_size":
        first = node.args[0]
        assert isinstance(first, fx.Node)
        return flow.values[first].shape[node.args[1]]
    assert callable(node.target), node
    call = call_of(node, flow.values)
    try:
        return node.target(*call.valued(node.args), **call.valued(node.kwargs))
    except TypeError:
        return None
