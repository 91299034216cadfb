"""The one table: what an op does to labels. An op that isn't in it stops them, which is always safe."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from corp_deploy.traced.programs.program import RUN, SAME, SHAPED, operation

from . import mixing, moves
from .call import Call
from .contractions import attention, contraction, convolution, embedding
from .flow import Flow
from .pointwise import channelwise, gated, is_pointwise, pointwise

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
    (channelwise, "batch_norm prelu"),
    (gated, "glu"),
    (
        mixing.over,
        """_log_softmax _softmax all amax amin any argmax argmin argsort count_nonzero cumprod cumsum kthvalue
        linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median min nanmean norm prod softmax softmin
        sort std std_mean sum topk var var_mean""",
    ),
    (
        mixing.of_maps,
        """_adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
        max_pool2d_with_indices grid_sampler upsample_bicubic2d upsample_bilinear2d upsample_linear1d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa upsample_nearest_exact2d _upsample_nearest_exact2d""",
    ),
    (mixing.last_axes, "layer_norm native_layer_norm rms_norm"),
    (mixing.group_norm, "group_norm"),
    (mixing.instance_norm, "instance_norm"),
    (mixing.native_batch_norm, "_native_batch_norm_legit_no_training"),
    (mixing.patches, "im2col col2im"),
    (contraction, "linear matmul mm bmm addmm baddbmm einsum"),
    (convolution, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    (attention, "scaled_dot_product_attention"),
    (embedding, "embedding"),
)
RULES: Mapping[str, Rule] = {op: rule for rule, ops in _BY_RULE for op in ops.split()}
"""By an op's name in ATen; besides, torch knows what works element by element."""


def rule_of(node: fx.Node) -> Rule | None:
    return RULES.get(operation(node)) or (pointwise if is_pointwise(node.target) else None)
