"""The norms of the model libraries, which are computed in float32 in every precision."""

from timm import layers

from corp_deploy.traced.programs.tree import Norm
from export.graph.precision import NORMS as TORCH_NORMS

_RMS = (layers.RmsNorm, layers.RmsNorm2d, layers.RmsNorm2dFp32, layers.RmsNormFp32)
_SIMPLE = (layers.SimpleNorm, layers.SimpleNorm2d, layers.SimpleNorm2dFp32, layers.SimpleNormFp32)
NORMS = (*TORCH_NORMS, Norm, *_RMS, *_SIMPLE)
