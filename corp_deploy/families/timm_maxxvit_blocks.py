"""timm's blocks of MaxViT and CoAtNet as parts over tokens.

Windows and grids are cut inside the attention, so that images stay in front of everything.
"""

from collections.abc import Mapping

import torch
from timm.layers import SEModule
from timm.models.maxxvit import (
    Attention2d,
    AttentionCl,
    ConvNeXtBlock,
    MaxxVitBlock,
    MbConvBlock,
    ParallelMaxxVitBlock,
    ParallelPartitionAttention,
    PartitionAttention2d,
    PartitionAttentionCl,
    TransformerBlock2d,
)
from torch import Tensor, nn

from .channel_site import ChannelSite
from .head_attention import HeadAttention
from .maps import Grid, OnMap
from .timm_folds import head_attention, norm_of_tokens, pointwise_mlp, position_bias, weights_of
from .token_blocks import Conversion, Kept, Part, Place, TokenBlock
from .windows import WindowPlan, Windows

_Modules = dict[str, nn.Module]
_EXCITED = (
    "an inverted bottleneck's hidden channels are each multiplied by a factor made of the means of all (squeeze and "
    "excitation), so that one that is left out changes all others"
)
_CONVOLVED = "block is {}: its layers are convolutions of maps, and no MLP of tokens"


def _attention(theirs: Attention2d | AttentionCl, windows: Windows | None) -> HeadAttention:
    return head_attention(
        weights_of(theirs.qkv),
        weights_of(theirs.proj),
        heads=theirs.num_heads,
        qk=theirs.dim_head,
        v=theirs.dim_head,
        scale=float(theirs.scale),
        by_head=theirs.head_first,
        position_bias=position_bias(theirs.rel_pos),
        windows=windows,
    )


def _scale(module: nn.Module, name: str) -> str:
    """The name of a layer scale's parameter, none where there is none."""
    return "" if isinstance(module, nn.Identity) else f"{name}.gamma"


def _of_mlp(block: nn.Module, prefix: str, grid: Grid) -> tuple[_Modules, Part]:
    scale = block.get_submodule("ls2")
    modules: _Modules = {
        f"{prefix}norm2": norm_of_tokens(block.get_submodule("norm2"), grid),
        f"{prefix}mlp": pointwise_mlp(block.get_submodule("mlp")),
        f"{prefix}ls2": scale,
    }
    return modules, Part(layer=f"{prefix}mlp", norm=f"{prefix}norm2", scale=_scale(scale, f"{prefix}ls2"))


def _partition(
    block: PartitionAttentionCl | PartitionAttention2d, prefix: str, grid: Grid
) -> tuple[_Modules, list[Part]]:
    rows, columns = block.partition_size
    windows = Windows(WindowPlan(grid=grid, window=(rows, columns), spread=not block.partition_block))
    modules, of_mlp = _of_mlp(block, prefix, grid)
    modules |= {
        f"{prefix}norm1": norm_of_tokens(block.norm1, grid),
        f"{prefix}attn": _attention(block.attn, windows),
        f"{prefix}ls1": block.ls1,
    }
    scale = _scale(block.ls1, f"{prefix}ls1")
    return modules, [Part(layer=f"{prefix}attn", norm=f"{prefix}norm1", scale=scale), of_mlp]


class SideBySide(nn.Module):
    """Two attentions of the same tokens, what each gives beside what the other does."""

    def __init__(self, attn_block: HeadAttention, attn_grid: HeadAttention) -> None:
        super().__init__()
        self.attn_block, self.attn_grid = attn_block, attn_grid

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.attn_block(x), self.attn_grid(x)), dim=-1)


def _parallel(block: ParallelPartitionAttention, prefix: str, grid: Grid) -> tuple[_Modules, list[Part]]:
    rows, columns = block.partition_size
    plans = (WindowPlan(grid=grid, window=(rows, columns), spread=spread) for spread in (False, True))
    of_block, of_grid = (
        _attention(theirs, Windows(plan))
        for theirs, plan in zip((block.attn_block, block.attn_grid), plans, strict=True)
    )
    modules, of_mlp = _of_mlp(block, prefix, grid)
    modules |= {
        f"{prefix}norm1": norm_of_tokens(block.norm1, grid),
        f"{prefix}both": SideBySide(of_block, of_grid),
        f"{prefix}ls1": block.ls1,
    }
    scale = _scale(block.ls1, f"{prefix}ls1")
    return modules, [Part(layer=f"{prefix}both", norm=f"{prefix}norm1", scale=scale), of_mlp]


class BeforeMlp(nn.Module):
    """What a ConvNeXt block of timm's MaxViT does in front of its MLP, of maps."""

    def __init__(self, block: ConvNeXtBlock) -> None:
        super().__init__()
        self.down, self.conv_dw, self.norm, self.rows = block.down, block.conv_dw, block.norm, not block.use_conv_mlp

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_dw(self.down(x))
        out: Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if self.rows else self.norm(x)
        return out


def _convolutions(block: nn.Module, prefix: str, place: Place) -> tuple[_Modules, list[Part], tuple[Kept, ...]]:
    """In a MaxViT's block or for themselves; `prefix` is the name there with a dot."""
    if not isinstance(block, ConvNeXtBlock):
        excited = any(isinstance(each, SEModule) for each in block.modules())
        reason = _EXCITED if excited else _CONVOLVED.format(type(block).__name__)
        kept = Kept(name=prefix.removesuffix("."), kind=ChannelSite.kind, reason=reason)
        name = f"{prefix}maps"
        return {name: OnMap(block, place.before)}, [Part(layer=name, alone=True)], (kept,)
    modules: _Modules = {
        f"{prefix}before": OnMap(BeforeMlp(block), place.before),
        f"{prefix}mlp": pointwise_mlp(block.mlp),
        f"{prefix}ls": block.ls,
    }
    shortcut = "" if isinstance(block.shortcut, nn.Identity) else f"{prefix}shortcut"
    if shortcut:
        modules[shortcut] = OnMap(block.shortcut, place.before)
    scale = _scale(block.ls, f"{prefix}ls")
    part = Part(layer=f"{prefix}mlp", norm=f"{prefix}before", scale=scale, shortcut=shortcut)
    return modules, [part], ()


def _of_convolutions(block: nn.Module, place: Place) -> TokenBlock:
    modules, parts, kept = _convolutions(block, "", place)
    return TokenBlock(block, modules, tuple(parts), place, kept)


def _of_transformer(block: nn.Module, place: Place) -> TokenBlock:
    assert isinstance(block, TransformerBlock2d), block
    modules, of_mlp = _of_mlp(block, "", place.behind)
    modules |= {
        "norm1": norm_of_tokens(block.norm1, place.before),
        "attn": _attention(block.attn, None),
        "ls1": block.ls1,
    }
    shortcut = "" if isinstance(block.shortcut, nn.Identity) else "shortcut"
    if shortcut:
        modules[shortcut] = OnMap(block.shortcut, place.before)
    of_heads = Part(layer="attn", norm="norm1", scale=_scale(block.ls1, "ls1"), shortcut=shortcut)
    return TokenBlock(block, modules, (of_heads, of_mlp), place)


def _of_maxvit(block: nn.Module, place: Place) -> TokenBlock:
    assert isinstance(block, MaxxVitBlock | ParallelMaxxVitBlock), block
    modules, parts, kept = _convolutions(block.conv, "conv.", place)
    if isinstance(block, ParallelMaxxVitBlock):
        more, further = _parallel(block.attn, "attn.", place.behind)
        modules, parts = modules | more, parts + further
    else:
        for name in ("attn_block", "attn_grid"):
            within = getattr(block, name)
            if within is not None:
                more, further = _partition(within, f"{name}.", place.behind)
                modules, parts = modules | more, parts + further
    return TokenBlock(block, modules, tuple(parts), place, kept)


CONVERSIONS: Mapping[type[nn.Module], Conversion] = {
    MbConvBlock: ("maps", _of_convolutions),
    ConvNeXtBlock: ("maps", _of_convolutions),
    TransformerBlock2d: ("maps", _of_transformer),
    MaxxVitBlock: ("maps", _of_maxvit),
    ParallelMaxxVitBlock: ("maps", _of_maxvit),
}
