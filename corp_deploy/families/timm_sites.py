"""Where timm's VisionTransformer can be reduced, and the branches and merges that its blocks are taken apart into."""

from collections.abc import Iterator
from dataclasses import replace

from timm.layers import Attention as TimmAttention
from timm.layers import DiffAttention, LayerScale
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import Tensor, nn

from .channel_site import ChannelSite
from .head_attention import HeadAttention
from .head_limits import keeps_all, keeps_qk, keeps_v
from .head_site import HeadSite, Mixing
from .site import Site
from .sites import Refusal, Sites
from .steps import Branch, Fork, Join, Merge, Passage, Step
from .timm_blocks import MergingBlock
from .timm_mlps import channel_site, mlp_refusal
from .timm_norms import have_layer_norms, layer_norm
from .token_merging import TokenMerge

# Blocks of one attention and one MLP, each a module of its own.
_OF_TWO = (TimmBlock, ResPostBlock, MergingBlock)


def require_vit(model: nn.Module) -> VisionTransformer:
    """The model as what its family accepts."""
    assert isinstance(model, VisionTransformer), type(model)
    return model


def _attention_refusal(attention: nn.Module) -> str:
    if isinstance(attention, HeadAttention):
        return ""
    if isinstance(attention, DiffAttention):
        return "attention is DiffAttention: a head is the difference of two softmaxes, normed before the projection"
    if type(attention) is not TimmAttention:
        return f"attention is {type(attention).__name__}, expected timm's Attention (one fused qkv)"
    if reason := keeps_all(attention):
        return reason
    if "gate" in dict(attention.named_children()):  # an attribute since timm 1.0.28 only
        return "gated attention output"
    return ""


def _head_site(name: str, attention: nn.Module, merge: nn.Module | None) -> HeadSite:
    if isinstance(attention, HeadAttention):
        heads, qk, v, geometry = attention.heads, attention.qk, attention.v, attention.geometry
    else:
        assert isinstance(attention, TimmAttention), type(attention)
        heads, qk, v, geometry = attention.num_heads, attention.head_dim, attention.head_dim, "square"
    mixing: Mixing = "none" if keeps_qk(attention) else "free"
    return HeadSite(
        name=name,
        module=attention,
        first=attention.qkv,
        last=attention.proj,
        heads=heads,
        qk=qk,
        v=v,
        scale=float(attention.scale),
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        geometry=geometry,
        mixing=mixing,
        merge=merge,
        norm=attention.norm if keeps_v(attention) else None,
        reason=keeps_qk(attention) or keeps_v(attention),
    )


def _places(name: str, block: nn.Module) -> tuple[list[str], list[str]]:
    """The names of a block's attentions and of its MLPs; none where they are no modules of their own."""
    if isinstance(block, ParallelThingsBlock):
        attentions = [f"{name}.attns.{index}.attn" for index in range(len(block.attns))]
        return attentions, [f"{name}.ffns.{index}.mlp" for index in range(len(block.ffns))]
    return ([f"{name}.attn"], [f"{name}.mlp"]) if isinstance(block, _OF_TWO) else ([], [])


def _block_refusal(name: str, block: nn.Module) -> Refusal:
    fused = isinstance(block, ParallelScalingBlock | DiffParallelScalingBlock)
    reason = f"block is {type(block).__name__}, expected timm's Block, ResPostBlock or ParallelThingsBlock"
    if fused:
        reason = (
            f"block is {type(block).__name__}: one layer gives hidden channels, queries, keys and values, which the "
            "block takes apart by widths of its own"
        )
    return Refusal(name=name, reason=reason, sites={f"{name}.attn": HeadSite.kind, f"{name}.mlp": ChannelSite.kind})


def sites(model: nn.Module) -> Sites:
    """The MLPs, then the attentions, dense or already reduced."""
    vit = require_vit(model)
    mlps: list[Site] = []
    attentions: list[Site] = []
    refused: list[Refusal] = []
    merge: nn.Module | None = None
    for index, block in enumerate(vit.blocks):
        of_heads, of_channels = _places(f"blocks.{index}", block)
        if not of_heads:
            refused.append(_block_refusal(f"blocks.{index}", block))
        for name in of_heads:
            attention = vit.get_submodule(name)
            if reason := _attention_refusal(attention):
                refused.append(Refusal(name=name, reason=reason, sites={name: HeadSite.kind}))
            else:
                attentions.append(_head_site(name, attention, merge))
        merge = block.merge if isinstance(block, MergingBlock) and block.merge is not None else merge
        for name in of_channels:
            mlp = vit.get_submodule(name)
            if reason := mlp_refusal(mlp):
                refused.append(Refusal(name=name, reason=reason, sites={name: ChannelSite.kind}))
            else:
                mlps.append(channel_site(name, mlp, merge))
    return Sites(every=(*mlps, *attentions), refused=tuple(refused))


def comes_apart(block: nn.Module) -> bool:
    """Whether a block is two branches one behind the other, each scaled as a whole or channel by channel, with norms in
    front of their layers.
    """
    return type(block) in (TimmBlock, MergingBlock) and _are_scales(block, ("ls1", "ls2"))


def _are_scales(block: nn.Module, names: tuple[str, ...]) -> bool:
    return all(isinstance(block.get_submodule(name), LayerScale | nn.Identity) for name in names)


def _branch(name: str, block: nn.Module, parts: tuple[str, str, str], read: Tensor | None) -> Branch:
    norm, layer, scale = (block.get_submodule(part) for part in parts)
    merging = block if isinstance(block, MergingBlock) and isinstance(layer, HeadAttention) else None
    return Branch(
        name=f"{name}.{parts[1]}",
        norm=norm,
        layer=layer,
        scale_C=scale.gamma.detach() if isinstance(scale, LayerScale) else None,
        read=read,
        mixes_tokens=merging is not None,
        beside=None if merging is None else merging.beside,
    )


def _read_before(merge: TokenMerge, read: Tensor | None) -> Tensor | None:
    """The tokens before a merge that those read behind it come of, all that it may touch where it touches any."""
    return read if read is None or bool((read < merge.protected).all()) else None


def _of_two(name: str, block: nn.Module, read: Tensor | None) -> Iterator[Step]:
    """An attention and an MLP, and what is merged between them."""
    merge = block.merge if isinstance(block, MergingBlock) else None
    yield _branch(name, block, ("norm1", "attn", "ls1"), read if merge is None else _read_before(merge, read))
    if merge is not None:
        yield Merge(name=f"{name}.merge", merge=merge)
    yield _branch(name, block, ("norm2", "mlp", "ls2"), read)


def _with_norms_behind(name: str, block: ResPostBlock, read: Tensor | None) -> Iterator[Step]:
    for part, norm in (("attn", block.norm1), ("mlp", block.norm2)):
        layer, behind = block.get_submodule(part), layer_norm(norm)
        yield Branch(name=f"{name}.{part}", norm=nn.Identity(), layer=layer, scale_C=None, read=read, behind=behind)


def _side_by_side(name: str, block: ParallelThingsBlock, read: Tensor | None) -> Iterator[Step]:
    """Attentions that read one stream, then MLPs that read one."""
    for group, part in (("attns", "attn"), ("ffns", "mlp")):
        yield Fork(name=name)
        for index, branch in enumerate(block.get_submodule(group).children()):
            whole = _branch(f"{name}.{group}.{index}", branch, ("norm", part, "ls"), read)
            yield replace(whole, forked=True)
        yield Join(name=name)


def _steps_of(name: str, block: nn.Module, read: Tensor | None) -> Iterator[Step]:
    if comes_apart(block):
        yield from _of_two(name, block, read)
    elif isinstance(block, ResPostBlock) and have_layer_norms(block):
        yield from _with_norms_behind(name, block, read)
    elif isinstance(block, ParallelThingsBlock) and all(
        _are_scales(branch, ("ls",)) for branch in (*block.attns, *block.ffns)
    ):
        yield from _side_by_side(name, block, read)
    else:
        yield Passage(module=block, name=name)


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """The blocks in the order they run, for evaluation (where drop-path is the identity): their branches, one behind
    the other or side by side, what is merged between them, and any other block whole.
    """
    blocks = require_vit(model).blocks
    for index, block in enumerate(blocks):
        yield from _steps_of(f"blocks.{index}", block, read if index == len(blocks) - 1 else None)
