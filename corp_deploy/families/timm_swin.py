"""timm's SwinTransformer family: attention in windows, in stages of ever fewer tokens of more channels.

Windows are an affair of the attention, which takes the whole map (see windows.py): its first and last layers,
the residual stream and everything that is counted have images in front and their tokens behind.

Legend: B images, N tokens of a stage, C channels.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from timm.layers import PatchEmbed, resize_rel_pos_bias_table, to_2tuple
from timm.models.swin_transformer import SwinTransformer, SwinTransformerStage
from timm.models.swin_transformer import checkpoint_filter_fn as filter_of_v1
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Stage
from timm.models.swin_transformer_v2 import checkpoint_filter_fn as filter_of_v2
from torch import Tensor, nn

from calib.inputs import Inputs

from . import timm_library
from .attention_site import site_of_attention
from .channel_site import ChannelSite
from .cosine import UnitLength
from .head_attention import HeadAttention
from .head_site import HeadSite
from .maps import Grid, OnRows
from .site import Site
from .sites import Refusal, Sites
from .steps import Branch, Passage, Step
from .timm_images import ImageSpec
from .timm_library import build as build
from .timm_library import classes as classes
from .timm_library import output_ports as output_ports
from .timm_mlps import channel_site, mlp_refusal
from .timm_norms import have_layer_norms, layer_norm
from .timm_windows import TABLE, WindowBlock, block_refusal, window_blocks
from .timm_windows import own_state as own_state

NAME = "timm-swin"
UNMERGEABLE = "windows are cut and neighbours joined by rows and columns of positions, so none can be merged away"
_COSINES = (
    "queries and keys are divided by their lengths before the dot product (cosine attention), so head dimensions can't "
    "be mixed or left out"
)
Swin = SwinTransformer | SwinTransformerV2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage by its name, the grid of the map that enters it and that of its blocks."""

    name: str
    downsample: nn.Module
    blocks: tuple[tuple[str, nn.Module], ...]
    before: Grid
    grid: Grid


def accepts(model: nn.Module) -> bool:
    """Whether it is timm's SwinTransformer or SwinTransformerV2."""
    return isinstance(model, SwinTransformer | SwinTransformerV2)


def _swin(model: nn.Module) -> Swin:
    assert isinstance(model, SwinTransformer | SwinTransformerV2), type(model)
    return model


def _grid(size: tuple[int, ...] | int) -> Grid:
    height, width = to_2tuple(size)
    return int(height), int(width)


def _stages(model: nn.Module) -> list[_Stage]:
    stages = []
    for index, stage in enumerate(_swin(model).layers):
        assert isinstance(stage, SwinTransformerStage | SwinTransformerV2Stage), stage
        name = f"layers.{index}"
        blocks = tuple((f"{name}.blocks.{place}", block) for place, block in enumerate(stage.blocks))
        before, grid = _grid(stage.input_resolution), _grid(stage.output_resolution)
        stages.append(_Stage(name=name, downsample=stage.downsample, blocks=blocks, before=before, grid=grid))
    return stages


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [block for stage in _stages(model) for block in stage.blocks]


def _head_site(name: str, attention: HeadAttention) -> HeadSite:
    cosines = isinstance(attention.k_norm, UnitLength)
    return site_of_attention(
        name, attention, mixing="none" if cosines else "free", norm=None, reason=_COSINES if cosines else ""
    )


def sites(model: nn.Module) -> Sites:
    """The MLPs, then the attentions, dense or already reduced."""
    mlps: list[Site] = []
    attentions: list[Site] = []
    refused: list[Refusal] = []
    for name, block in _blocks(model):
        attn, mlp = f"{name}.attn", f"{name}.mlp"
        if reason := block_refusal(block):
            refused.append(Refusal(name=attn, reason=reason, sites={attn: HeadSite.kind}))
        else:
            attention = block.get_submodule("attn")
            assert isinstance(attention, HeadAttention), attention
            attentions.append(_head_site(attn, attention))
        if reason := mlp_refusal(block.get_submodule("mlp")):
            refused.append(Refusal(name=mlp, reason=reason, sites={mlp: ChannelSite.kind}))
        else:
            mlps.append(channel_site(mlp, block.get_submodule("mlp")))
    return Sites(every=(*mlps, *attentions), refused=tuple(refused))


def _branches(name: str, block: nn.Module, grid: Grid, read: Tensor | None) -> Iterator[Step]:
    if not isinstance(block, WindowBlock) or (block.behind and not have_layer_norms(block)):
        yield Passage(module=OnRows(block, grid), name=name)
        return
    for part, norm in (("attn", block.norm1), ("mlp", block.norm2)):
        yield Branch(
            name=f"{name}.{part}",
            norm=nn.Identity() if block.behind else norm,
            layer=block.get_submodule(part),
            scale_C=None,
            read=read,
            behind=layer_norm(norm) if block.behind else None,
        )


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """The branches of the blocks in the order they run, and what makes a stage's map of the one before."""
    stages = _stages(model)
    for stage in stages:
        if not isinstance(stage.downsample, nn.Identity):
            yield Passage(module=OnRows(stage.downsample, stage.before), name=f"{stage.name}.downsample")
        for name, block in stage.blocks:
            is_last = stage is stages[-1] and block is stage.blocks[-1][1]
            yield from _branches(name, block, stage.grid, read if is_last else None)


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first stage."""
    assert isinstance(inputs, Tensor), type(inputs)
    x_BHWC: Tensor = _swin(model).patch_embed(inputs)
    return x_BHWC.flatten(1, 2)


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block."""
    swin = _swin(model)
    return swin.forward_head(swin.norm(x_BNC.unflatten(1, _stages(model)[-1].grid)))


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """The last stage's stream behind the model's norm."""
    normed_BNC: Tensor = _swin(model).norm(x_BNC)
    return normed_BNC


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """Of the last stage's tokens, all of them positions of its map."""
    height, width = _stages(model)[-1].grid
    return ("position",) * (height * width)


def grid(model: nn.Module, layer: str) -> Grid | None:
    """That of the layer's stage."""
    stages = _stages(model)
    return next((stage.grid for stage in stages if f"{layer}.".startswith(f"{stage.name}.")), stages[-1].grid)


def depth(model: nn.Module) -> int:
    """Blocks of all stages."""
    return len(_blocks(model))


def input_spec(model: nn.Module) -> ImageSpec:
    """Image shape from the patch embedding, the rest of the preprocessing from timm's data config of the model."""
    embedding = _swin(model).patch_embed
    assert isinstance(embedding, PatchEmbed), embedding
    assert embedding.img_size is not None, "maps are cut into windows by the size of the images"
    return timm_library.image_spec(model, embedding.img_size)


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter: patches of another size resampled, and Microsoft's names
    mapped, in whose checkpoints a stage's maps are joined at its end. Likewise position biases of another window.
    """
    tables = {f"{name}.attn.{TABLE}": block for name, block in window_blocks(model)}
    others = {name: tensor for name, tensor in state.items() if name not in tables}
    of_timm = filter_of_v1 if isinstance(model, SwinTransformer) else filter_of_v2
    adapted: dict[str, Tensor] = of_timm(others, _swin(model))
    resampled = {name: _resampled(state[name], block) for name, block in tables.items() if name in state}
    return adapted | resampled


def _resampled(table_TH: Tensor, block: WindowBlock) -> Tensor:
    """timm's resampling, of which torch warns that it is slow."""
    window, shape = block.window, block.state_dict()["attn.position_bias.table"].shape
    if table_TH.shape == shape:
        return table_TH
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"timm\.layers\.interpolate")
        resized: Tensor = resize_rel_pos_bias_table(table_TH, window, tuple(shape))
    return resized
