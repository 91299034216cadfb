"""timm's blocks of TinyViT as parts over tokens.

The norms, which timm has inside the attention and the MLP, stand in front of them, windows are cut inside the
attention. timm pads a map before its norm, so that padding is that norm's bias.
"""

from collections.abc import Mapping

from timm.models.tiny_vit import Attention, MBConv, PatchMerging, TinyVitBlock
from torch import nn

from .channel_site import ChannelSite
from .depthwise import DepthwiseMlp
from .head_attention import HeadAttention
from .maps import Grid, OnMap
from .timm_folds import as_linear, depthwise, levit_attention, pointwise_mlp
from .token_blocks import Conversion, Kept, Part, Place, TokenBlock, whole
from .windows import WindowPlan, Windows

_CONVOLVED = "block is MBConv: what stands between its 1x1 convolutions is no convolution of each channel by itself"


def _attention(theirs: Attention, grid: Grid, window: int) -> HeadAttention:
    plan = WindowPlan(grid=grid, window=(window, window))
    is_padded = plan.padded != grid
    windows = Windows(plan, filling_C=theirs.norm.bias if is_padded else None)
    return levit_attention(theirs, None if plan.count == 1 and not is_padded else windows)


def _of_tiny_vit(block: nn.Module, place: Place) -> TokenBlock:
    assert isinstance(block, TinyVitBlock), block
    modules: dict[str, nn.Module] = {
        "norm1": block.attn.norm,
        "attn": _attention(block.attn, place.before, block.window_size),
        "local_conv": OnMap(block.local_conv, place.before),
        "norm2": block.mlp.norm,
        "mlp": pointwise_mlp(block.mlp),
    }
    parts = (
        Part(layer="attn", norm="norm1"),
        Part(layer="local_conv", alone=True),
        Part(layer="mlp", norm="norm2"),
    )
    return TokenBlock(block, modules, parts, place)


def _of_convolutions(block: nn.Module, place: Place) -> TokenBlock:
    """Its hidden channels are convolved one by one, so that it is an MLP, with an activation behind the sum."""
    assert isinstance(block, MBConv), block
    between = depthwise(block.conv2.conv, block.conv2.bn, place.before)
    if between is None:
        return whole(block, place, (Kept(name="", kind=ChannelSite.kind, reason=_CONVOLVED),))
    fc1, fc2 = (as_linear(layer.conv, layer.bn) for layer in (block.conv1, block.conv3))
    modules: dict[str, nn.Module] = {
        "mlp": DepthwiseMlp(fc1, block.act1, between, block.act2, fc2),
        "act3": block.act3,
    }
    return TokenBlock(block, modules, (Part(layer="mlp"), Part(layer="act3", alone=True)), place)


CONVERSIONS: Mapping[type[nn.Module], Conversion] = {
    MBConv: ("maps", _of_convolutions),
    TinyVitBlock: ("rows", _of_tiny_vit),
    PatchMerging: ("maps", whole),
}
