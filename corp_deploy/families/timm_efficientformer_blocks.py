"""timm's blocks of EfficientFormer, V1 and V2, as parts over tokens.

In evaluation a batch norm is a part of the 1x1 convolution before it, and both are a linear layer of tokens.
"""

from collections.abc import Mapping

from timm.models.efficientformer import Downsample, MetaBlock1d, MetaBlock2d
from timm.models.efficientformer_v2 import Downsample as DownsampleV2
from timm.models.efficientformer_v2 import EfficientFormerV2Block
from torch import nn

from .channel_site import ChannelSite
from .depthwise import DepthwiseMlp
from .head_site import HeadSite
from .maps import Grid, OnMap
from .timm_folds import (
    as_linear,
    depthwise,
    has_activation,
    is_folded,
    levit_attention,
    pointwise_mlp,
)
from .token_blocks import Conversion, Kept, Part, Place, TokenBlock, whole

_ACTIVE = (
    "attention is {}: an activation stands between its values, beside a convolution of them, and the output "
    "projection, and all its layers are convolutions of maps"
)
_CONVOLVED = "what stands between the layers of the MLP is no convolution of each channel by itself"


def _of_tokens(block: nn.Module, place: Place) -> TokenBlock:
    assert isinstance(block, MetaBlock1d), block
    modules = {name: block.get_submodule(name) for name in ("norm1", "ls1", "norm2", "mlp", "ls2")}
    modules["token_mixer"] = levit_attention(block.token_mixer)
    parts = (
        Part(layer="token_mixer", norm="norm1", scale="ls1.gamma"),
        Part(layer="mlp", norm="norm2", scale="ls2.gamma"),
    )
    return TokenBlock(block, modules, parts, place)


def _of_maps(block: nn.Module, place: Place) -> TokenBlock:
    """Its token mixer is a mean over neighbours."""
    assert isinstance(block, MetaBlock2d), block
    if not (is_folded(block.mlp.norm1) and is_folded(block.mlp.norm2)):
        reason = f"a {type(block.mlp.norm1).__name__} between the layers mixes all hidden channels"
        return whole(block, place, (Kept(name="", kind=ChannelSite.kind, reason=reason),))
    modules: dict[str, nn.Module] = {
        "token_mixer": OnMap(block.token_mixer, place.before),
        "ls1": block.ls1,
        "ls2": block.ls2,
        "mlp": pointwise_mlp(block.mlp, ("norm1", "norm2")),
    }
    parts = (Part(layer="token_mixer", scale="ls1.gamma"), Part(layer="mlp", scale="ls2.gamma"))
    return TokenBlock(block, modules, parts, place)


def _mlp_of_v2(mlp: nn.Module, grid: Grid) -> nn.Module | None:
    """Its activations stand in its batch norms; None where it is made of something else."""
    layers = [mlp.get_submodule(name) for name in ("fc1", "mid", "fc2")]
    if isinstance(layers[1], nn.Identity):
        return None
    convolutions, norms = ([layer.get_submodule(name) for layer in layers] for name in ("conv", "bn"))
    between = depthwise(convolutions[1], norms[1], grid)
    if between is None or not (all(map(has_activation, norms[:2])) and is_folded(norms[2])):
        return None
    fc1, fc2 = as_linear(convolutions[0], norms[0]), as_linear(convolutions[2], norms[2])
    return DepthwiseMlp(fc1, norms[0].get_submodule("act"), between, norms[1].get_submodule("act"), fc2)


def _of_v2(block: nn.Module, place: Place) -> TokenBlock:
    assert isinstance(block, EfficientFormerV2Block), block
    scale = "" if isinstance(block.ls2, nn.Identity) else "ls2.gamma"
    ours = _mlp_of_v2(block.mlp, place.before)
    modules: dict[str, nn.Module] = {"mlp": OnMap(block.mlp, place.before) if ours is None else ours, "ls2": block.ls2}
    parts, kept = [Part(layer="mlp", scale=scale)], list[Kept]()
    if ours is None:
        kept.append(Kept(name="mlp", kind=ChannelSite.kind, reason=_CONVOLVED))
    if block.token_mixer is not None:
        modules |= {"token_mixer": OnMap(block.token_mixer, place.before), "ls1": block.ls1}
        scale = "" if isinstance(block.ls1, nn.Identity) else "ls1.gamma"
        parts.insert(0, Part(layer="token_mixer", scale=scale))
        kept.append(Kept(name="token_mixer", kind=HeadSite.kind, reason=_ACTIVE.format("Attention2d")))
    return TokenBlock(block, modules, tuple(parts), place, tuple(kept))


def _of_downsample_v2(block: nn.Module, place: Place) -> TokenBlock:
    assert isinstance(block, DownsampleV2), block
    if block.attn is None:
        return whole(block, place)
    return whole(block, place, (Kept(name="", kind=HeadSite.kind, reason=_ACTIVE.format("Attention2dDownsample")),))


CONVERSIONS: Mapping[type[nn.Module], Conversion] = {
    EfficientFormerV2Block: ("maps", _of_v2),
    MetaBlock1d: ("tokens", _of_tokens),
    MetaBlock2d: ("maps", _of_maps),
    Downsample: ("maps", whole),
    DownsampleV2: ("maps", _of_downsample_v2),
}
