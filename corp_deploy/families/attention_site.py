"""The site of an attention that this package builds."""

from torch import nn

from .head_attention import HeadAttention
from .head_site import HeadSite, Mixing


def site_of_attention(
    name: str,
    attention: HeadAttention,
    *,
    mixing: Mixing = "free",
    norm: nn.Module | None = None,
    reason: str = "",
    biasless: bool = False,
) -> HeadSite:
    """A site in HeadAttention itself; `mixing`, `norm`, `reason` and `biasless` as HeadSite's."""
    return HeadSite(
        name=name,
        module=attention,
        first=attention.qkv,
        last=attention.proj,
        heads=attention.heads,
        qk=attention.qk,
        v=attention.v,
        scale=attention.scale,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        geometry=attention.geometry,
        mixing=mixing,
        norm=norm,
        rotary=attention.rotary,
        causal=attention.causal,
        grouped=attention.heads // attention.groups,
        biasless=biasless,
        reason=reason,
    )
