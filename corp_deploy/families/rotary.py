"""Rotary positions of sequences (RoFormer, arXiv 2104.09864).

Plane p of P consists of the dimensions p and p + P of a head, in whatever order a library has them. A reduced head has
the frequencies of the planes that it keeps; they are never computed from its width.

Legend: B texts, N tokens, H heads, or 1 for all, D width of a head, P planes of it.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

Factor = Annotated[float, Meta(gt=0.0, le=1e6)]


class Rope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the frequencies of rotary planes: theta^(-p/P) radians per position.

    Scaling `linear` divides all of them by `factor`. Scaling `llama3` (Llama 3.1) divides those of wavelengths above
    `original` / `low`, and by a smaller factor those of wavelengths down to `original` / `high`.
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
        """Return the radians per position of each plane [P], float32, computed as transformers does."""
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
    """Return every plane, rotated by its token's angle: [B,H,N,2P]."""
    one, other = x_BHND.chunk(2, dim=-1)
    return torch.cat((one * cos_HNP - other * sin_HNP, other * cos_HNP + one * sin_HNP), dim=-1)


class SequenceRotary(nn.Module):
    """Rotary positions of queries and keys, with frequencies [H,P] of planes: one row for all heads or one for each."""

    freqs_HP: Tensor

    def __init__(self, freqs_HP: Tensor) -> None:
        super().__init__()
        self.register_buffer("freqs_HP", freqs_HP)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SequenceRotary":
        """Keep frequencies in float32 where the model is cast, since half types are off by a position at 2,048."""
        exact_HP = self.freqs_HP
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.freqs_HP = exact_HP.to(self.freqs_HP.device)
        return self

    def tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the sines and cosines [H,N,P] of a sequence with this number of tokens."""
        place_N1 = torch.arange(tokens, dtype=torch.float32, device=self.freqs_HP.device).unsqueeze(1)
        angle_HNP = place_N1 * self.freqs_HP.unsqueeze(1)
        return angle_HNP.sin(), angle_HNP.cos()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        sin_HNP, cos_HNP = (each.to(q.dtype) for each in self.tables(q.shape[-2]))
        return apply_rotary(q, sin_HNP, cos_HNP), apply_rotary(k, sin_HNP, cos_HNP)
