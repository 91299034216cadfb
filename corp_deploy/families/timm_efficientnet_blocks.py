"""timm's EfficientNets and MobileNetV3s: their stem, blocks and tail (MobileNetV2: arXiv 1801.04381; EfficientNet:
1905.11946; V2: 2104.00298; MobileNetV4: 2404.10518).
"""

from collections.abc import Mapping
from types import MappingProxyType

from timm.models._efficientnet_blocks import (
    ConvBnAct,
    DepthwiseSeparableConv,
    EdgeResidual,
    InvertedResidual,
    UniversalInvertedResidual,
)
from timm.models.efficientnet import EfficientNet
from torch import nn

from .conv_block import ConvBlock
from .timm_folding import Folding, Maps, Parts, Unknown

STEM = ("conv_stem", "bn1")
STAGES = ("blocks",)
TAIL = ("conv_head", "bn2")

Pair = tuple[str, str]
_ROWS: Mapping[type[nn.Module], tuple[Pair | str, ...]] = MappingProxyType(
    {
        ConvBnAct: (("conv", "bn1"), "aa"),
        DepthwiseSeparableConv: (("conv_s2d", "bn_s2d"), ("conv_dw", "bn1"), "aa", "se", ("conv_pw", "bn2")),
        EdgeResidual: (("conv_exp", "bn1"), "aa", "se", ("conv_pwl", "bn2")),
        InvertedResidual: (
            ("conv_s2d", "bn_s2d"),
            ("conv_pw", "bn1"),
            ("conv_dw", "bn2"),
            "aa",
            "se",
            ("conv_pwl", "bn3"),
        ),
        UniversalInvertedResidual: ("dw_start", "pw_exp", "dw_mid", "se", "pw_proj", "dw_end", "layer_scale"),
    }
)
"""What of a block runs, in its order: convolutions with the norm behind, or what stands between them, by name."""


def converted(name: str, block: nn.Module, maps: Maps) -> ConvBlock:
    """A block of ours. Raises Unknown for a block of another kind."""
    if type(block) not in _ROWS:
        raise Unknown(f"block is {type(block).__name__}, expected {', '.join(kind.__name__ for kind in _ROWS)}")
    parts = dict(block.named_children())
    folding = Folding(name, maps)
    for each in _ROWS[type(block)]:
        if isinstance(each, str):
            folding.add_any(each, parts[each])
        elif each[0] in parts:
            folding.add(each[0], parts[each[0]], parts[each[1]])
    adds: bool = vars(block)["has_skip"]
    return ConvBlock(folding.parts, maps.before[name], adds=adds)


def _pair(names: Pair, model: nn.Module, maps: Maps) -> Parts:
    """A convolution with its norm folded, and the norm's activation."""
    conv, norm = names
    if isinstance(model.get_submodule(conv), nn.Identity):
        return {}
    modules = Folding("", maps).convolution(conv, model.get_submodule(conv), model.get_submodule(norm))
    return dict(zip(names, modules, strict=True))


def stem(model: nn.Module, maps: Maps) -> Parts:
    """What stands in the place of timm's modules in front of the blocks, by their names."""
    return _pair(("conv_stem", "bn1"), model, maps)


def tail(model: nn.Module, maps: Maps) -> Parts:
    """Likewise behind the blocks; a MobileNetV3's last convolution reads what its head has pooled."""
    return _pair(("conv_head", "bn2"), model, maps) if isinstance(model, EfficientNet) else {}
