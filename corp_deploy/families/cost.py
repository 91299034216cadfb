"""Multiply-adds and parameters of one site at any width, by formula; at its own width they equal what counting finds.

PURE. Both are linear in every width. A zero-padded head counts its padded width in Q K' and A V, because that is what
the engine multiplies.
"""


def mlp_macs(*, tokens: int, dim: int, hidden: int) -> int:
    """MACs of the two linear layers of one MLP for one image."""
    return 2 * tokens * dim * hidden


def attention_macs(*, tokens: int, dim: int, heads: int, qk: int, v: int, padded: bool) -> int:
    """MACs of one attention layer for one image: projections, Q K' and A V."""
    projections = tokens * dim * heads * (2 * qk + 2 * v)
    core_qk, core_v = (max(qk, v), max(qk, v)) if padded else (qk, v)
    return projections + heads * tokens * tokens * (core_qk + core_v)


def mlp_parameters(*, dim: int, hidden: int, input_bias: bool = True, output_bias: bool = True) -> int:
    """Parameters of fc1 and fc2."""
    return (dim + input_bias) * hidden + (hidden + output_bias) * dim


def attention_parameters(
    *, dim: int, heads: int, qk: int, v: int, qkv_bias: bool = True, proj_bias: bool = True
) -> int:
    """Parameters of qkv and proj."""
    return (dim + qkv_bias) * heads * (2 * qk + v) + (heads * v + proj_bias) * dim
