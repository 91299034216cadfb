"""Self-attention of text encoders and decoders in plain torch, one layer for queries, keys and values.

Legend: B batch, N tokens, C channels, H heads, G groups of heads, D width of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.traced.models.token_merging import HIDDEN, key_bias

from .sequence_rotary import SequenceRotary


def shared_by_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values of groups [B,G,N,D], each for all heads of its group in turn."""
    groups = x.shape[-3]
    return x if groups == heads else x.repeat_interleave(heads // groups, dim=-3)


def causal_bias(q: Tensor) -> Tensor:
    """What is added to the scores of queries [B,H,N,D] so that none sees a key behind its own place: [N,N]."""
    place_N = torch.arange(q.shape[-2], device=q.device)
    return (place_N[:, None] < place_N).to(q.dtype) * HIDDEN


def rows_by_head(rows_BNR: Tensor, heads: int) -> Tensor:
    """What a layer gives of each token, the rows of the heads in turn [B,N,R] -> [B,H,N,R/H]."""
    by_head: Tensor = rows_BNR.unflatten(-1, (heads, -1)).transpose(-3, -2)
    return by_head


class HeadAttention(nn.Module):
    """Multi-head self-attention [B,N,C] -> [B,N,C] with an explicit softmax scale; heads are `head` wide.

    Of grouped queries (arXiv 2305.13245) `groups` of heads in turn share keys and values, so that `qkv` has rows
    q (heads * head), k and v (groups * head each). `rotary` turns queries and keys by where tokens are. `causal`: a
    token sees itself and those before it.
    """

    rotary: SequenceRotary | None

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        head: int,
        qkv_bias: bool,
        proj_bias: bool,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        rotary: SequenceRotary | None = None,
        groups: int | None = None,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.head, self.groups, self.causal = heads, head, groups or heads, causal
        if heads % self.groups:
            raise ValueError(f"attention widths: {heads} heads are no multiple of {groups} groups")
        self.scale = head**-0.5
        self.qkv = nn.Linear(dim, sum(self.rows), bias=qkv_bias)
        self.q_norm = q_norm if q_norm is not None else nn.Identity()
        self.k_norm = k_norm if k_norm is not None else nn.Identity()
        self.rotary = rotary
        self.proj = nn.Linear(heads * head, dim, bias=proj_bias)

    @property
    def rows(self) -> tuple[int, int, int]:
        """How many rows of `qkv` give queries, keys and values."""
        return self.heads * self.head, self.groups * self.head, self.groups * self.head

    def _heads(self, x_BNC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B,H,N,D] of the input."""
        apart = zip(self.qkv(x_BNC).split(self.rows, -1), (self.heads, self.groups, self.groups), strict=True)
        q, k, v = (rows_by_head(rows, count) for rows, count in apart)
        q, k, v = self.q_norm(q), shared_by_heads(self.k_norm(k), self.heads), shared_by_heads(v, self.heads)
        if self.rotary is not None:
            q, k = self.rotary(q, k)
        return q, k, v

    def forward(self, x: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        """x [B,N,C] -> [B,N,C]; a token of weight 0, of any type, is seen by none, one of weight n as n tokens."""
        q, k, v = self._heads(x)
        bias_BHNN = None if weights_BN is None else key_bias(weights_BN, q.dtype)
        alone = self.causal and bias_BHNN is None
        if self.causal and bias_BHNN is not None:
            bias_BHNN = bias_BHNN + causal_bias(q)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_BHNN, is_causal=alone, scale=self.scale)
        out: Tensor = self.proj(z.transpose(-3, -2).flatten(-2))
        return out
