"""Multiply-adds and parameters of one site at any width, by formula; at its own width they equal what counting finds.

PURE. Both are linear in every width. A zero-padded head counts its padded width in Q K' and A V, because that is what
the engine multiplies.
"""


def mlp_macs(*, tokens: int, dim: int, hidden: int, rows: int = 1) -> int:
    """MACs of the linear layers of one MLP for one image; `rows` of the first ones make a channel, two if gated."""
    return (rows + 1) * tokens * dim * hidden


def attention_macs(
    *,
    tokens: int,
    dim: int,
    heads: int,
    qk: int,
    v: int,
    padded: bool,
    groups: int | None = None,
) -> int:
    """MACs of one attention layer for one image: projections, Q K' and A V. `groups` of heads share keys and values. A
    causal attention's products are counted whole.
    """
    shared = heads if groups is None else groups
    projections = dim * tokens * (heads * (qk + v) + shared * (qk + v))
    core_qk, core_v = (max(qk, v), max(qk, v)) if padded else (qk, v)
    return projections + heads * tokens * tokens * (core_qk + core_v)


def mlp_parameters(*, dim: int, hidden: int, input_bias: bool = True, output_bias: bool = True, rows: int = 1) -> int:
    """Parameters of fc1 and fc2; `rows` of fc1 make a channel."""
    return (dim + input_bias) * rows * hidden + (hidden + output_bias) * dim


def attention_parameters(
    *,
    dim: int,
    heads: int,
    qk: int,
    v: int,
    qkv_bias: bool = True,
    proj_bias: bool = True,
    groups: int | None = None,
) -> int:
    """Parameters of qkv and proj; `groups` as for its MACs."""
    shared = heads if groups is None else groups
    return (dim + qkv_bias) * (heads * qk + shared * (qk + v)) + (heads * v + proj_bias) * dim
