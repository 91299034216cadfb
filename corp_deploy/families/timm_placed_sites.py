"""Where timm's models of placed blocks are reduced, and the branches that they are taken apart into."""

from collections.abc import Iterator

from timm.layers import AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from .attention_site import site_of_attention
from .channel_site import ChannelSite
from .head_attention import HeadAttention
from .head_limits import keeps_all, keeps_qk, keeps_v
from .head_site import HeadSite, Mixing
from .site import Site
from .sites import Refusal, Sites
from .steps import Branch, Passage, Step
from .timm_mlps import channel_site, mlp_refusal
from .timm_norms import have_layer_norms, layer_norm
from .timm_placed import PlacedBlock, Told


def foreign_attention(attention: nn.Module) -> str:
    """Why timm's attention that is told its positions can't be one of ours, or nothing."""
    if type(attention) not in (AttentionRope, EvaAttention):
        return f"attention is {type(attention).__name__}, expected timm's EvaAttention or AttentionRope"
    if "gate" in dict(attention.named_children()):
        return "gated attention output"
    groups = attention.num_kv_groups if isinstance(attention, AttentionRope) else 1
    return f"{groups} heads share their keys and values (grouped queries)" if groups > 1 else ""


def _attention_refusal(attention: nn.Module) -> str:
    if isinstance(attention, Told):
        return foreign_attention(attention.inner)
    return keeps_all(attention)


def _head_site(name: str, attention: HeadAttention) -> HeadSite:
    qk, v = keeps_qk(attention), keeps_v(attention)
    mixing: Mixing = "none" if qk else "free" if attention.rotary is None else "planes"
    return site_of_attention(name, attention, mixing=mixing, norm=attention.norm if v else None, reason=qk or v)


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"blocks.{name}", block) for name, block in model.get_submodule("blocks").named_children()]


def _refusal(name: str, block: nn.Module) -> Refusal:
    reason = (
        f"block is {type(block).__name__} and its attention is timm's own, which can't be heard or made narrower; a "
        "model that corp-deploy builds or loads has other ones of the same function"
    )
    return Refusal(name=name, reason=reason, sites={f"{name}.attn": HeadSite.kind, f"{name}.mlp": ChannelSite.kind})


def sites(model: nn.Module) -> Sites:
    """The MLPs, then the attentions, dense or already reduced."""
    mlps: list[Site] = []
    attentions: list[Site] = []
    refused: list[Refusal] = []
    for name, block in _blocks(model):
        if not isinstance(block, PlacedBlock):
            refused.append(_refusal(name, block))
            continue
        attention, mlp = block.attn, block.mlp
        if reason := _attention_refusal(attention):
            refused.append(Refusal(name=f"{name}.attn", reason=reason, sites={f"{name}.attn": HeadSite.kind}))
        else:
            assert isinstance(attention, HeadAttention), (name, attention)
            attentions.append(_head_site(f"{name}.attn", attention))
        if reason := mlp_refusal(mlp):
            refused.append(Refusal(name=f"{name}.mlp", reason=reason, sites={f"{name}.mlp": ChannelSite.kind}))
        else:
            mlps.append(channel_site(f"{name}.mlp", mlp))
    return Sites(every=(*mlps, *attentions), refused=tuple(refused))


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """The blocks in the order they run: the two branches of one whose norms can be taken apart, any other whole."""
    blocks = _blocks(model)
    for name, block in blocks:
        if not isinstance(block, PlacedBlock) or (block.behind and not have_layer_norms(block)):
            yield Passage(module=block, name=name)
            continue
        counted = read if block is blocks[-1][1] else None
        for part, norm, scale in (("attn", block.norm1, block.gamma_1), ("mlp", block.norm2, block.gamma_2)):
            yield Branch(
                name=f"{name}.{part}",
                norm=nn.Identity() if block.behind else norm,
                layer=block.get_submodule(part),
                scale_C=None if scale is None else scale.detach(),
                read=counted,
                behind=layer_norm(norm) if block.behind else None,
            )
