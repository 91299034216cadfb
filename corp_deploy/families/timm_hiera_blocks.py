"""timm's blocks of Hiera as parts over tokens.

Tokens stand so that those of a mask unit, within which the first stages attend, are as many apart as there are units.
Where a stage begins, the queries of several tokens become one by their maximum.
"""

from collections.abc import Mapping

import torch
from timm.models.hiera import HieraBlock, MaskUnitAttention
from torch import Tensor, nn

from .head_attention import HeadAttention
from .pooled_queries import PooledQueries
from .timm_folds import head_attention, weights_of
from .token_blocks import Conversion, Part, Place, TokenBlock
from .windows import WindowPlan, Windows


def _units(theirs: MaskUnitAttention, tokens: int) -> Windows | None:
    """Of this many tokens, None where each sees all."""
    if not theirs.use_mask_unit_attn:
        return None
    entering, leaving = theirs.q_stride * theirs.window_size, theirs.window_size
    units = tokens // entering
    behind = WindowPlan(grid=(leaving, units), window=(leaving, 1))
    plan = WindowPlan(grid=(entering, units), window=(entering, 1))
    return Windows(plan, behind=None if theirs.q_stride == 1 else Windows(behind))


def _attention(theirs: MaskUnitAttention, tokens: int) -> HeadAttention:
    return head_attention(
        weights_of(theirs.qkv),
        weights_of(theirs.proj),
        heads=theirs.heads,
        qk=theirs.head_dim,
        v=theirs.head_dim,
        scale=float(theirs.scale),
        by_head=False,
        q_norm=PooledQueries(theirs.q_stride) if theirs.q_stride > 1 else None,
        windows=_units(theirs, tokens),
    )


class ProjectedMaximum(nn.Module):
    """[B,S * n,C] -> [B,n,O]: the maximum over S tokens of a linear layer's outputs."""

    def __init__(self, proj: nn.Module, count: int) -> None:
        super().__init__()
        self.proj, self.count = proj, count

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x).unflatten(1, (self.count, -1)).amax(dim=1)
        return out


class MaximumAndMean(nn.Module):
    """[B,S * n,C] -> [B,n,2C] of S tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        apart_BSnC = x.unflatten(1, (self.count, -1))
        return torch.cat((apart_BSnC.amax(dim=1), apart_BSnC.mean(dim=1)), dim=-1)


def _of_hiera(block: nn.Module, place: Place) -> TokenBlock:
    """Where a linear layer takes the stream to more channels, that layer reads the normed stream, as attention does."""
    assert isinstance(block, HieraBlock), block
    scales = {name: "" if isinstance(block.get_submodule(name), nn.Identity) else f"{name}.gamma" for name in _SCALES}
    modules = {name: block.get_submodule(name) for name in ("norm1", "norm2", "mlp", *_SCALES)}
    modules["attn"] = _attention(block.attn, place.tokens)
    count = block.attn.q_stride
    of_mlp = Part(layer="mlp", norm="norm2", scale=scales["ls2"])
    if not block.do_expand:
        return TokenBlock(block, modules, (Part(layer="attn", norm="norm1", scale=scales["ls1"]), of_mlp), place)
    if block.proj is None:
        modules["shortcut"] = MaximumAndMean(count)
        of_heads = (Part(layer="attn", norm="norm1", scale=scales["ls1"], shortcut="shortcut"),)
    else:
        modules["shortcut"] = ProjectedMaximum(block.proj, count)
        of_heads = (Part(layer="norm1", alone=True), Part(layer="attn", scale=scales["ls1"], shortcut="shortcut"))
    return TokenBlock(block, modules, (*of_heads, of_mlp), place)


_SCALES = ("ls1", "ls2")
CONVERSIONS: Mapping[type[nn.Module], Conversion] = {HieraBlock: ("tokens", _of_hiera)}
