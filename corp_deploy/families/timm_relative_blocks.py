"""timm's Beit and VisionTransformerRelPos with blocks whose attention knows where tokens stand to each other.

What timm makes of learned tables, of one for all blocks, or of a small network's outputs (Swin v2, arXiv 2111.09883,
section 3.3) is one table a block here: those are added up, this is run once.

Legend: H heads, P patches, N tokens, L relations that two tokens can have.
"""

from collections.abc import Mapping

import torch
from timm.layers import LayerScale, PatchEmbed, RelPosBias, RelPosMlp
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit, Block, RelativePositionBias
from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock, VisionTransformerRelPos
from torch import Tensor, nn

from .head_attention import HeadAttention
from .modules import replaced
from .position_bias import TableBias
from .timm_placed import HeadLayout, PlacedBlock, head_attention, placed_blocks
from .timm_placed import own_state as of_placed_blocks

Relative = Beit | VisionTransformerRelPos
TABLE = "relative_position_bias_table"
_SHARED = ("rel_pos_bias", "shared_rel_pos")
_Source = BeitAttention | RelativePositionBias | RelPosBias | RelPosMlp


def patches(model: Relative) -> PatchEmbed:
    """What makes tokens of images."""
    embedding = model.patch_embed
    assert isinstance(embedding, PatchEmbed), embedding
    return embedding


def _sources(model: Relative, attention: nn.Module) -> list[_Source]:
    """What of timm's says how tokens stand to each other in a block."""
    children = dict(model.named_children())
    modules = [attention, dict(attention.named_children()).get("rel_pos"), *(children.get(name) for name in _SHARED)]
    own = [module for module in modules if isinstance(module, _Source)]
    return [
        each for each in own if not isinstance(each, BeitAttention) or each.relative_position_bias_table is not None
    ]


def _relation(source: _Source, tokens: int) -> Tensor:
    """[N,N]; of a network a token that is no patch has one relation to all, the last."""
    index = source.relative_position_index
    assert isinstance(index, Tensor), source
    related = round(index.numel() ** 0.5)
    relation_NN = index.new_full((tokens, tokens), _relations(source) - 1)
    relation_NN[tokens - related :, tokens - related :] = index.view(related, related)
    return relation_NN


def _relations(source: _Source) -> int:
    if isinstance(source, RelPosMlp):
        coordinates = source.rel_coords_log
        assert isinstance(coordinates, Tensor), source
        return coordinates.shape[:2].numel() + int(source.prefix_tokens > 0)
    count: int = source.relative_position_bias_table.shape[0]
    return count


def _bias(model: Relative, attention: nn.Module, heads: int) -> TableBias | None:
    """With a table of zeros; None where nothing is added to the scores."""
    sources = _sources(model, attention)
    if not sources:
        return None
    relation_NN = _relation(sources[0], model.num_prefix_tokens + patches(model).num_patches)
    return TableBias(patches(model).proj.weight.new_zeros(_relations(sources[0]), heads), relation_NN)


def _placed(model: Relative, block: nn.Module) -> PlacedBlock:
    assert isinstance(block, Block | RelPosBlock | ResPostRelPosBlock), block
    attention = block.attn
    width = attention.qkv.out_features // (3 * attention.num_heads)
    layout = HeadLayout(heads=attention.num_heads, width=width)
    ours = head_attention(attention, layout, position_bias=_bias(model, attention, attention.num_heads))
    scales: list[nn.Parameter | None] = [None, None]
    if isinstance(block, Block):
        scales = [block.gamma_1, block.gamma_2]
    elif isinstance(block, RelPosBlock):
        scales = [each.gamma if isinstance(each, LayerScale) else None for each in (block.ls1, block.ls2)]
    behind = isinstance(block, ResPostRelPosBlock)
    return PlacedBlock(block, ours, (scales[0], scales[1]), behind=behind, layout=layout)


def placed(model: Relative) -> nn.Module:
    """The model with its own weights."""
    blocks: dict[str, nn.Module] = {
        f"blocks.{index}": _placed(model, block) for index, block in enumerate(model.blocks)
    }
    ours = replaced(model, blocks)
    for name in _SHARED:
        if name in dict(ours.named_children()):
            setattr(ours, name, None)
    ours.load_state_dict(own_state(ours, model.state_dict()), assign=True)
    return ours


def _of_network(state: Mapping[str, Tensor], grid: tuple[int, int], relations: int) -> Tensor:
    """The outputs [L,H] of a network of timm's with these weights; a relation beyond those of patches is worth 0."""
    hidden, heads = state["fc1.weight"].shape[0], state["fc2.weight"].shape[0]
    mode = "cr" if "fc2.bias" in state else "swin"
    with torch.device(state["fc1.weight"].device):
        network = RelPosMlp(window_size=grid, num_heads=heads, hidden_dim=hidden, mode=mode).eval()
    network.mlp.load_state_dict(dict(state), assign=True)
    with torch.no_grad():
        table_LH: Tensor = network.bias_act(network.mlp(network.rel_coords_log).view(-1, heads))
    table_LH = table_LH if network.bias_gain is None else network.bias_gain * table_LH
    return torch.cat([table_LH, table_LH.new_zeros(relations - len(table_LH), heads)])


def _within(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _table(state: Mapping[str, Tensor], attention: str, grid: tuple[int, int], relations: int) -> Tensor | None:
    """Of a block: what timm's weights of it and of all blocks together say."""
    sources = (attention, f"{attention}.rel_pos", *_SHARED)
    tables = [state[f"{source}.{TABLE}"] for source in sources if f"{source}.{TABLE}" in state]
    networks = [weights for source in sources if (weights := _within(state, f"{source}.mlp."))]
    tables += [_of_network(weights, grid, relations) for weights in networks]
    return torch.stack(tables).sum(dim=0) if tables else None


def own_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state under timm's names as that of a model with placed blocks."""
    ours = of_placed_blocks(model, state)
    assert isinstance(model, Relative), type(model)
    grid = patches(model).grid_size
    for name, block in placed_blocks(model):
        attention = block.attn
        assert isinstance(attention, HeadAttention), name
        for number in (1, 2):
            if f"{name}.ls{number}.gamma" in ours:
                ours[f"{name}.gamma_{number}"] = ours.pop(f"{name}.ls{number}.gamma")
        if isinstance(bias := attention.position_bias, TableBias):
            prefix = f"{name}.attn.position_bias"
            table_LH = _table(state, f"{name}.attn", grid, len(bias.table))
            ours |= {} if table_LH is None else {f"{prefix}.table": table_LH}
    return {key: value for key, value in ours.items() if not key.startswith(tuple(f"{name}." for name in _SHARED))}
