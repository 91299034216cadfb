"""timm's Eva with blocks whose attention knows its positions.

Legend: B images, N tokens, P patches among them, H heads, D dimensions of a head.
"""

import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from .modules import replaced
from .rotary import LearnedRotary, Rotary
from .timm_placed import HeadLayout, PlacedBlock, Told, head_attention
from .timm_placed_sites import foreign_attention

_FIXED = (RotaryEmbeddingCat, RotaryEmbeddingDinoV3)


def _table(eva: Eva) -> Tensor | None:
    """Sines and cosines of the patches [P,2D] as timm's attention takes them; None where they are learned, or none."""
    if not isinstance(eva.rope, _FIXED):
        return None
    # A model of any image size keeps no table.
    shape = list(eva.patch_embed.grid_size) if eva.dynamic_img_size else None
    table_PX: Tensor = eva.rope.get_embed(shape)
    return table_PX.detach()


def _fixed(table_PX: Tensor, prefix: int, *, interleaved: bool) -> Rotary:
    """One for all heads; tokens before the patches are not turned."""
    sin_PD, cos_PD = table_PX.chunk(2, dim=-1)
    width = sin_PD.shape[1] // 2
    sin_PX, cos_PX = (each[:, ::2] if interleaved else each[:, :width] for each in (sin_PD, cos_PD))
    still = sin_PX.new_zeros(prefix, width)
    return Rotary(torch.cat([still, sin_PX])[None].clone(), torch.cat([torch.ones_like(still), cos_PX])[None].clone())


def _learned(rope: RotaryEmbeddingMixed, grid: tuple[int, int], index: int, prefix: int) -> LearnedRotary:
    """Of one block; tokens before the patches stand at the origin, which turns nothing."""
    across_P, down_P = rope._get_grid_values(list(grid))
    places_2P = torch.stack([across_P, down_P]).to(rope.freqs.device, rope.freqs.dtype)
    places_2N = torch.cat([places_2P.new_zeros(2, prefix), places_2P], dim=1)
    return LearnedRotary(rope.freqs.detach()[:, index].clone(), places_2N)


def _rotary(eva: Eva, table_PX: Tensor | None, index: int, *, interleaved: bool) -> Rotary | None:
    if table_PX is not None:
        return _fixed(table_PX, eva.num_prefix_tokens, interleaved=interleaved)
    if isinstance(eva.rope, RotaryEmbeddingMixed):
        return _learned(eva.rope, eva.patch_embed.grid_size, index, eva.num_prefix_tokens)
    return None


def _placed(eva: Eva, block: nn.Module, table_PX: Tensor | None, index: int) -> PlacedBlock:
    assert isinstance(block, EvaBlock | EvaBlockPostNorm), block
    attention, behind = block.attn, isinstance(block, EvaBlockPostNorm)
    scales = (None, None) if isinstance(block, EvaBlockPostNorm) else (block.gamma_1, block.gamma_2)
    if foreign_attention(attention):
        assert table_PX is not None, attention
        return PlacedBlock(block, Told(attention, table_PX.clone()), scales, behind=behind, layout=None)
    interleaved = eva.rope is not None and not attention.rotate_half
    layout = HeadLayout(heads=attention.num_heads, width=attention.head_dim, interleaved=interleaved)
    rotary = _rotary(eva, table_PX, index, interleaved=interleaved)
    return PlacedBlock(block, head_attention(attention, layout, rotary=rotary), scales, behind=behind, layout=layout)


def with_placed_blocks(model: nn.Module) -> nn.Module:
    """A model just built, Eva with such blocks; itself where its positions are of a kind that is not known here."""
    return _of_eva(model) if isinstance(model, Eva) else model


def _of_eva(eva: Eva) -> nn.Module:
    table_PX = _table(eva)
    known = eva.rope is None or isinstance(eva.rope, (*_FIXED, RotaryEmbeddingMixed))
    if not known or (table_PX is None and any(foreign_attention(block.get_submodule("attn")) for block in eva.blocks)):
        return eva
    blocks = {f"blocks.{index}": _placed(eva, block, table_PX, index) for index, block in enumerate(eva.blocks)}
    ours = replaced(eva, blocks)
    ours.rope = None  # type: ignore[assignment]  # as in a model without rotary positions
    return ours
