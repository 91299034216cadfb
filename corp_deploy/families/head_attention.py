"""Self-attention of text encoders and decoders in plain torch, one layer for queries, keys and values, and rotary
positions of a sequence (RoFormer, arXiv 2104.09864): token n is at place n, whatever the length.

Plane p of P is the dimensions p and p + P of a head, whichever way a library orders them. Frequencies are those of the
dense head, whichever planes of it are left: they are never made anew from a width.

Legend: B texts, N tokens, C channels, H heads, or 1 for all, G groups of heads, D width of a head, P planes of it.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.traced.models.token_merging import HIDDEN, key_bias

Factor = Annotated[float, Meta(gt=0.0, le=1e6)]


class Rope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast planes turn: theta^(-p/P) radians a place, `linear` all slower by `factor`, `llama3` the slow ones alone
    (Llama 3.1): those of wavelengths above `original` / `low`, and in part those down to `original` / `high`.
    """

    theta: Annotated[float, Meta(gt=1.0, le=1e12)] = 10_000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: Factor = 1.0
    low: Factor = 1.0
    high: Factor = 4.0
    original: Annotated[int, Meta(ge=1, le=10_000_000)] = 8192

    def __post_init__(self) -> None:
        if self.scaling == "llama3" and self.high <= self.low:
            raise ValueError(f"rope: high {self.high:g} is not above low {self.low:g}")

    def frequencies(self, planes: int) -> Tensor:
        """Radians a place [P], float32, computed as transformers does."""
        exponents_P = torch.arange(0, 2 * planes, 2, dtype=torch.int64).float() / (2 * planes)
        own_P = 1.0 / (self.theta**exponents_P)
        if self.scaling == "default":
            return own_P
        if self.scaling == "linear":
            return own_P / self.factor
        wavelength_P = 2.0 * math.pi / own_P
        slow_P = torch.where(wavelength_P > self.original / self.low, own_P / self.factor, own_P)
        share_P = (self.original / wavelength_P - self.low) / (self.high - self.low)
        between_P = (1.0 - share_P) * slow_P / self.factor + share_P * slow_P
        is_between_P = (wavelength_P >= self.original / self.high) & (wavelength_P <= self.original / self.low)
        return torch.where(is_between_P, between_P, slow_P)


def apply_rotary(x_BHND: Tensor, sin_HNP: Tensor, cos_HNP: Tensor) -> Tensor:
    """Every plane turned by its token's angle: [B,H,N,2P]."""
    one, other = x_BHND.chunk(2, dim=-1)
    return torch.cat((one * cos_HNP - other * sin_HNP, other * cos_HNP + one * sin_HNP), dim=-1)


class SequenceRotary(nn.Module):
    """Turns queries and keys of any sequence by frequencies [H,P] of planes, one row for all heads or each its own."""

    freqs_HP: Tensor

    def __init__(self, freqs_HP: Tensor) -> None:
        super().__init__()
        self.register_buffer("freqs_HP", freqs_HP)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SequenceRotary":
        """Frequencies stay float32 where a model becomes another type: half a place off in 2,048 is another place."""
        exact_HP = self.freqs_HP
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.freqs_HP = exact_HP.to(self.freqs_HP.device)
        return self

    def tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Sines and cosines of sequences of this length [H,N,P]."""
        place_N1 = torch.arange(tokens, dtype=torch.float32, device=self.freqs_HP.device).unsqueeze(1)
        angle_HNP = place_N1 * self.freqs_HP.unsqueeze(1)
        return angle_HNP.sin(), angle_HNP.cos()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        sin_HNP, cos_HNP = (each.to(q.dtype) for each in self.tables(q.shape[-2]))
        return apply_rotary(q, sin_HNP, cos_HNP), apply_rotary(k, sin_HNP, cos_HNP)


def shared_by_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values of groups [B,G,N,D], each for all heads of its group in turn."""
    groups = x.shape[-3]
    return x if groups == heads else x.repeat_interleave(heads // groups, dim=-3)


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
        q, k, v = (rows.unflatten(-1, (count, -1)).transpose(-3, -2) for rows, count in apart)
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
            place_N = torch.arange(q.shape[-2], device=q.device)
            bias_BHNN = bias_BHNN + (place_N[:, None] < place_N).to(q.dtype) * HIDDEN
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_BHNN, is_causal=alone, scale=self.scale)
        return self.proj(z.transpose(-3, -2).flatten(-2))
