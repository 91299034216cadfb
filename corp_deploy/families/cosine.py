"""Queries and keys of length 1, so that their dot products are cosines (Swin V2, arXiv 2111.09883, section 3.2).

Legend: H heads, N tokens, D dimensions of a head.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_SCALE = 100.0


class UnitLength(nn.Module):
    """[...,D] -> [...,D]; in float32, since squares of half precision overflow."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.float(), dim=-1).to(x.dtype) if x.dtype == torch.float16 else F.normalize(x, dim=-1)


class ScaledUnitLength(UnitLength):
    """[...,H,N,D] -> [...,H,N,D], the length that of each head's scale, at most 100."""

    def __init__(self, logit_scale: Tensor) -> None:
        """`logit_scale` [H,1,1]: natural logarithms."""
        super().__init__()
        self.logit_scale = nn.Parameter(logit_scale.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        scale_H11 = self.logit_scale.clamp(max=math.log(MOST_SCALE)).exp()
        return super().forward(x) * scale_H11
