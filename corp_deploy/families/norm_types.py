"""The norms of the model libraries, which are computed in float32 in every precision."""

from timm.layers import (
    RmsNorm,
    RmsNorm2d,
    RmsNorm2dFp32,
    RmsNormFp32,
    SimpleNorm,
    SimpleNorm2d,
    SimpleNorm2dFp32,
    SimpleNormFp32,
)

from corp_deploy.traced.programs.tree import Norm
from export.graph.precision import NORMS as TORCH_NORMS

NORMS = (
    *TORCH_NORMS,
    Norm,
    RmsNorm,
    RmsNorm2d,
    RmsNorm2dFp32,
    RmsNormFp32,
    SimpleNorm,
    SimpleNorm2d,
    SimpleNorm2dFp32,
    SimpleNormFp32,
)
