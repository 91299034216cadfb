"""timm's ResNets and ResNeXts: their stem and blocks (arXiv 1512.03385, 1611.05431; deep stems: 1812.01187)."""

from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn

from .conv_block import ConvBlock
from .timm_folding import Folding, Maps, Parts, Unknown, plain_act, shortcut_of

STEM = ("conv1", "bn1", "act1", "maxpool")
STAGES = ("layer1", "layer2", "layer3", "layer4")
TAIL: tuple[str, ...] = ()


def _row(name: str, block: BasicBlock | Bottleneck, maps: Maps) -> Parts:
    folding = Folding(name, maps)
    folding.add("conv1", block.conv1, block.bn1, ("act1", block.act1))
    if isinstance(block, BasicBlock):
        folding.add_between("aa", block.aa)
        folding.add("conv2", block.conv2, block.bn2)
    else:
        folding.add("conv2", block.conv2, block.bn2, ("act2", block.act2))
        folding.add_between("aa", block.aa)
        folding.add("conv3", block.conv3, block.bn3)
    if block.se is not None:
        folding.add_between("se", block.se)
    return folding.parts


def converted(name: str, block: nn.Module, maps: Maps) -> ConvBlock:
    """A block of ours. Raises Unknown for a block of another kind."""
    if type(block) not in (BasicBlock, Bottleneck):
        raise Unknown(f"block is {type(block).__name__}, expected timm's BasicBlock or Bottleneck")
    assert isinstance(block, BasicBlock | Bottleneck), block
    last = "act2" if isinstance(block, BasicBlock) else "act3"
    shortcut = None
    if block.downsample is not None:
        shortcut = "downsample", shortcut_of(f"{name}.downsample", block.downsample, maps)
    act = last, plain_act(block.get_submodule(last))
    return ConvBlock(_row(name, block, maps), maps.before[name], adds=True, shortcut=shortcut, act=act)


def _deep_stem(convolutions: nn.Sequential, last: nn.Module, maps: Maps) -> ConvBlock:
    """Three convolutions in a row, the last one's norm behind them."""
    layers = list(convolutions)
    folding = Folding("conv1", maps)
    norms = [*layers[1::3], last]
    acts = [*((str(3 * place + 2), act) for place, act in enumerate(layers[2::3])), None]
    for place, (conv, norm, act) in enumerate(zip(layers[::3], norms, acts, strict=True)):
        folding.add(str(3 * place), conv, norm, act)
    return ConvBlock(folding.parts, maps.before["conv1"], adds=False)


def stem(model: nn.Module, maps: Maps) -> Parts:
    """What stands in the place of timm's modules in front of the blocks, by their names."""
    conv, norm, act = (model.get_submodule(name) for name in ("conv1", "bn1", "act1"))
    first: nn.Module
    if isinstance(conv, nn.Sequential):
        first = _deep_stem(conv, norm, maps)
    else:
        first, _ = Folding("", maps).convolution("conv1", conv, norm)
    return {"conv1": first, "bn1": nn.Identity(), "act1": plain_act(act)}


def tail(model: nn.Module, maps: Maps) -> Parts:
    """Nothing stands behind the blocks."""
    return {}
