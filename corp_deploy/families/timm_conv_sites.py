"""The sites of a network whose blocks are rows of convolutions: one of timm's, or what stands in front of another."""

from torch import nn

from .conv_block import ConvBlock, conv_blocks
from .conv_site import ConvSite
from .site import Site
from .sites import Refusal
from .timm_convnets import blocks_of, why_kept


def conv_sites(model: nn.Module, above: str = "") -> tuple[tuple[Site, ...], tuple[Refusal, ...]]:
    """The rows of convolutions in the order they run, dense or already reduced, those of deep stems first, and blocks
    that are refused; a row of one convolution is neither. `above`: what stands in front of their names in the model
    around this network.
    """
    every: list[Site] = []
    refused: list[Refusal] = []
    blocks = blocks_of(model)
    named = {name for name, _ in blocks}
    for own, block in [*(each for each in conv_blocks(model) if each[0] not in named), *blocks]:
        name = f"{above}{own}"
        reason = ConvSite.refusal_of(block) if isinstance(block, ConvBlock) else why_kept(own, model)
        if reason:
            refused.append(Refusal(name=name, reason=reason, sites={name: ConvSite.kind}))
        elif isinstance(block, ConvBlock) and ConvSite.is_in(block):
            every.append(ConvSite(name=name, block=block))
    return tuple(every), tuple(refused)
