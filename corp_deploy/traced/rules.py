"""The one table: what an op does to labels. An op that isn't in it stops them, which is always safe."""

from collections.abc import Callable, Mapping
from typing import Any

from . import mixing as mix
from . import moves as move
from .attention import addmm, attention, einsum, matmul
from .call import Call
from .flow import Flow
from .layers import convolution, embedding, linear
from .pointwise import POINTWISE, batch_norm, pointwise

Rule = Callable[[Flow, Call], Any]


def _rules() -> Mapping[str, Rule]:
    table: dict[str, Rule] = {}
    for ops, rule in _BY_SET:
        table |= dict.fromkeys(ops, rule)
    return table | _BY_NAME


_BY_SET: tuple[tuple[frozenset[str], Rule], ...] = (
    (move.SAME, move.same),
    (move.SHAPED, move.shaped),
    (move.RUN, move.moved),
    (POINTWISE, pointwise),
    (mix.OVER_DIM, mix.over),
    (mix.POOLS | mix.RESIZES, mix.of_maps),
)
_BY_NAME: dict[str, Rule] = {
    "getitem": move.picked,
    "cat": move.joined,
    "concat": move.joined,
    "stack": move.joined,
    "select_scatter": move.scattered,
    "slice_scatter": move.scattered,
    "copy": move.replaced,
    "new_zeros": move.filled,
    "new_ones": move.filled,
    "new_full": move.filled,
    "new_empty": move.filled,
    "pad": move.padded,
    "constant_pad_nd": move.padded,
    "index": move.indexed,
    "index_select": move.indexed,
    "gather": move.indexed,
    "batch_norm": batch_norm,
    "_native_batch_norm_legit_no_training": mix.with_statistics(batch_norm),
    "native_layer_norm": mix.with_statistics(mix.last_axes),
    "group_norm": mix.group_norm,
    "instance_norm": mix.instance_norm,
    "layer_norm": mix.last_axes,
    "rms_norm": mix.last_axes,
    "im2col": mix.patches,
    "col2im": mix.unpatched,
    "linear": linear,
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "addmm": addmm,
    "baddbmm": addmm,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "conv_transpose1d": convolution,
    "conv_transpose2d": convolution,
    "conv_transpose3d": convolution,
    "embedding": embedding,
}
RULES: Mapping[str, Rule] = _rules()
