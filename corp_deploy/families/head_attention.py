"""Self-attention whose query/key width may differ from its value width: the ordinary module a reduced model is made of.

Legend: B batch, N tokens, C channels, H heads, G groups of heads, q/k width `qk`, v width `v`.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .modules import linear
from .sequence_rotary import SequenceRotary
from .token_merging import HIDDEN, key_bias

Geometry = Literal["square", "padded", "ragged"]

Beside = Literal["keys", "attention"]
"""What an attention gives beside its result: keys of all heads side by side [B,N,heads * qk], or how much the first
token attends to each, the mean over the heads [B,N]."""


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
    """Multi-head self-attention [B,N,C] -> [B,N,C] with an explicit softmax scale.

    `qkv` is one linear layer with rows q (heads * qk), k (heads * qk), v (heads * v), as in timm, so a dense layer is
    the case qk = v. The scale is the dense model's, never derived from the reduced width. With geometry `padded` the
    narrower of (q, k) and v is zero-padded to the wider inside the graph, which leaves the result unchanged and lets
    engines keep their fused attention kernel. `fused` selects torch's scaled_dot_product_attention; without it the
    same product is spelled MatMul-Softmax-MatMul, which is the form to export. With qk = v = 0 all that it gives is the
    projection's bias. `norm` stands between all heads and the projection.

    `rotary` turns queries and keys by where tokens are. `causal`: a token sees itself and those before it.

    Of grouped queries (arXiv 2305.13245) `groups` of heads in turn share keys and values, so that `qkv` has rows
    q (heads * qk), k (groups * qk), v (groups * v).
    """

    rotary: SequenceRotary | None

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        qk: int,
        v: int,
        scale: float,
        geometry: Geometry,
        qkv_bias: bool,
        proj_bias: bool,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        norm: nn.Module | None = None,
        rotary: SequenceRotary | None = None,
        fused: bool = True,
        groups: int | None = None,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if min(dim, heads) < 1 or (min(qk, v) < 1 and (qk, v) != (0, 0)):
            raise ValueError(
                f"attention widths: got dim={dim}, heads={heads}, qk={qk}, v={v}, expected all at least 1, or qk=v=0"
            )
        if geometry == "square" and qk != v:
            raise ValueError(f"geometry 'square' needs qk = v, got qk={qk}, v={v}; use 'padded' or 'ragged'")
        self.heads, self.qk, self.v = heads, qk, v
        self.groups, self.causal = groups or heads, causal
        if heads % self.groups:
            raise ValueError(f"attention widths: {heads} heads are no multiple of {groups} groups")
        self.scale = scale
        self.geometry: Geometry = geometry
        self.fused = fused
        self.qkv = linear(dim, sum(self.rows), bias=qkv_bias)
        self.q_norm = q_norm if q_norm is not None else nn.Identity()
        self.k_norm = k_norm if k_norm is not None else nn.Identity()
        self.norm = norm if norm is not None else nn.Identity()
        self.rotary = rotary
        self.proj = linear(heads * v, dim, bias=proj_bias)

    @property
    def rows(self) -> tuple[int, int, int]:
        """How many rows of `qkv` give queries, keys and values."""
        return self.heads * self.qk, self.groups * self.qk, self.groups * self.v

    def _heads(self, x_BNC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys [B,H,N,qk] and values [B,H,N,v] of the input."""
        apart = zip(self.qkv(x_BNC).split(self.rows, -1), (self.heads, self.groups, self.groups), strict=True)
        q, k, v = (rows_by_head(rows, count) for rows, count in apart)
        q, k, v = self.q_norm(q), shared_by_heads(self.k_norm(k), self.heads), shared_by_heads(v, self.heads)
        if self.rotary is not None:
            q, k = self.rotary(q, k)
        return q, k, v

    def forward(
        self,
        x: Tensor,
        weights_BN: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        beside: Beside | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [B,N,C] -> [B,N,C]; a token of weight 0, of any type, is seen by none, one of weight n as n tokens.

        With `beside` two results. A mask by query is refused.
        """
        if attn_mask is not None or is_causal:
            raise ValueError("HeadAttention takes no attention mask")
        if not self.v:
            if beside is not None:
                raise ValueError(f"HeadAttention of no width has no {beside} to tell")
            constant: Tensor = self.proj(x[..., :0])
            return constant
        q, k, v = self._heads(x)
        bias_BHNN = None if weights_BN is None else key_bias(weights_BN, q.dtype)
        extra = None if beside is None else self._beside(beside, q, k, bias_BHNN)
        if self.geometry == "padded" and self.qk != self.v:
            width = max(self.qk, self.v)
            q, k, v = (F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (q, k, v))
        z = self._attend(q, k, v, bias_BHNN)[..., : self.v].transpose(-3, -2).flatten(-2)
        out: Tensor = self.proj(self.norm(z))
        return out if extra is None else (out, extra)

    def _beside(self, beside: Beside, q: Tensor, k: Tensor, bias_BHNN: Tensor | None) -> Tensor:
        if beside == "keys":
            return k.transpose(1, 2).flatten(2)
        scores = (q[:, :, :1] * self.scale) @ k.transpose(-2, -1)
        scores = scores if bias_BHNN is None else scores + bias_BHNN[:, :, :1]
        return scores.softmax(-1, dtype=torch.float32).mean(dim=1).squeeze(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias_BHNN: Tensor | None) -> Tensor:
        alone = self.fused and self.causal and bias_BHNN is None
        if self.causal and not alone:
            bias_BHNN = causal_bias(q) if bias_BHNN is None else bias_BHNN + causal_bias(q)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias_BHNN, is_causal=alone, scale=self.scale)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        if bias_BHNN is not None:
            scores = scores + bias_BHNN
        # Softmax in float32 costs no kernel in an engine and cannot overflow; for a float32 model both casts are
        # nothing.
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
