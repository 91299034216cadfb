"""timm's RegNets: their stem and blocks (arXiv 2003.13678; Z, whose blocks end without activation: 2103.06877)."""

from collections import OrderedDict

from timm.layers.conv_bn_act import ConvNormAct
from timm.models.regnet import Bottleneck, RegNet
from torch import nn

from .conv_block import ConvBlock
from .timm_folding import Folding, Maps, Parts, Unknown, plain_act, shortcut_of

STEM = ("stem",)
STAGES = ("s1", "s2", "s3", "s4")
TAIL = ("final_conv",)


def converted(name: str, block: nn.Module, maps: Maps) -> ConvBlock:
    """A block of ours. Raises Unknown for a block of another kind."""
    if type(block) is not Bottleneck:
        raise Unknown(
            f"block is {type(block).__name__}, expected timm's Bottleneck, with norms behind its convolutions"
        )
    assert isinstance(block, Bottleneck), block
    folding = Folding(name, maps)
    folding.add_conv_norm_act("conv1", block.conv1)
    folding.add_conv_norm_act("conv2", block.conv2)
    folding.add_between("se", block.se)
    folding.add_conv_norm_act("conv3", block.conv3)
    shortcut = None
    if not isinstance(block.downsample, nn.Identity | None):
        shortcut = "downsample", shortcut_of(f"{name}.downsample", block.downsample, maps)
    act = None if isinstance(block.act3, nn.Identity) else ("act3", plain_act(block.act3))
    adds = block.downsample is not None
    return ConvBlock(folding.parts, maps.before[name], adds=adds, shortcut=shortcut, act=act)


def _alone(name: str, module: nn.Module, maps: Maps) -> nn.Module:
    """A convolution with its norm folded and its activation; what is none as it is."""
    if not isinstance(module, ConvNormAct):
        return plain_act(module)
    folding = Folding(name, maps)
    folding.add("conv", module.conv, module.bn)
    return nn.Sequential(OrderedDict(folding.parts))


def stem(model: nn.Module, maps: Maps) -> Parts:
    """What stands in the place of timm's modules in front of the blocks, by their names."""
    assert isinstance(model, RegNet), type(model)
    return {"stem": _alone("stem", model.stem, maps)}


def tail(model: nn.Module, maps: Maps) -> Parts:
    """Likewise behind the blocks: a convolution, an activation or nothing."""
    assert isinstance(model, RegNet), type(model)
    return {"final_conv": _alone("final_conv", model.final_conv, maps)}
