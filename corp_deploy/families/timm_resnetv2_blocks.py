"""timm's ResNetV2 as it stands in front of hybrids (arXiv 2010.11929, section 4.1): convolutions of standardised
weights (arXiv 1903.10520), and group norms behind them.
"""

from collections import OrderedDict

from timm.models.resnetv2 import Bottleneck, DownsampleAvg, DownsampleConv
from torch import nn

from .conv_block import ConvBlock
from .timm_folding import Folding, Maps, Parts, Unknown, plain_act

STEM = ("stem",)
STAGES = ("stages",)
TAIL: tuple[str, ...] = ()


def _shortcut(name: str, module: nn.Module, maps: Maps) -> nn.Module:
    if not isinstance(module, DownsampleConv | DownsampleAvg):
        raise Unknown(f"its shortcut is {type(module).__name__}, expected timm's DownsampleConv or DownsampleAvg")
    folding = Folding(name, maps)
    folding.add_between("pool", dict(module.named_children()).get("pool"))
    folding.add_normed("conv", module.conv, "norm", module.norm)
    return nn.Sequential(OrderedDict(folding.parts))


def converted(name: str, block: nn.Module, maps: Maps) -> ConvBlock:
    """A block of ours. Raises Unknown for a block of another kind."""
    if type(block) is not Bottleneck:
        raise Unknown(f"block is {type(block).__name__}, expected timm's Bottleneck, whose norms stand behind")
    assert isinstance(block, Bottleneck), block
    folding = Folding(name, maps)
    folding.add_normed("conv1", block.conv1, "norm1", block.norm1)
    folding.add_normed("conv2", block.conv2, "norm2", block.norm2)
    folding.add_normed("conv3", block.conv3, "norm3", block.norm3)
    shortcut = None
    if block.downsample is not None:
        shortcut = "downsample", _shortcut(f"{name}.downsample", block.downsample, maps)
    act = "act3", plain_act(block.act3)
    return ConvBlock(folding.parts, maps.before[name], adds=True, shortcut=shortcut, act=act)


def stem(model: nn.Module, maps: Maps) -> Parts:
    """What stands in the place of timm's modules in front of the blocks, by their names."""
    folding = Folding("stem", maps)
    parts = model.get_submodule("stem").named_children()
    convolutions = ((name, part) for name, part in parts if isinstance(part, nn.Conv2d))
    return {f"stem.{name}": folding.convolution(name, part, None)[0] for name, part in convolutions}


def tail(model: nn.Module, maps: Maps) -> Parts:
    """Nothing stands behind the blocks."""
    return {}
