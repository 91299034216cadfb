"""Where calibration listens in an attention: what its queries, keys and values are as they meet.

Legend: B inputs, H heads, G groups of them that share keys and values, N tokens, D dims.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from calib.sites import HeadTaps, Tap

from .head_attention import rows_by_head, shared_by_heads

Take = Callable[[Tensor], Tensor]


class Listened(Protocol):
    """What an attention has to tell of where to listen: see HeadSite."""

    @property
    def name(self) -> str: ...

    @property
    def first(self) -> nn.Linear: ...

    @property
    def last(self) -> nn.Linear: ...

    @property
    def heads(self) -> int: ...

    @property
    def groups(self) -> int: ...

    @property
    def qk(self) -> int: ...

    @property
    def q_norm(self) -> nn.Module: ...

    @property
    def k_norm(self) -> nn.Module: ...

    @property
    def keeps_qk(self) -> bool: ...

    @property
    def in_planes(self) -> bool: ...

    @property
    def scale(self) -> float: ...

    @property
    def rotary(self) -> nn.Module | None: ...

    @property
    def merge(self) -> nn.Module | None: ...

    @property
    def causal(self) -> bool: ...


def _identity(x: Tensor) -> Tensor:
    return x


def _then(first: Take, second: Take) -> Take:
    return lambda x: second(first(x))


def _queries(turned: Any) -> Tensor:
    q_BHND: Tensor = turned[0]
    return q_BHND


def _keys(turned: Any) -> Tensor:
    k_BHND: Tensor = turned[1]
    return k_BHND


def _rows(site: Listened, start: int, count: int) -> Take:
    """Rows of the qkv output from `start`, of so many heads or groups, by head."""
    stop = start + count * site.qk

    def take(qkv: Tensor) -> Tensor:
        return rows_by_head(qkv[..., start:stop], count)

    return take


def taps_of(site: Listened) -> HeadTaps:
    """q and k as they enter the dot product, keys of a group for each of its heads, and the input of the output
    projection.
    """
    shared: Take = _identity if site.groups == site.heads else lambda k_BGND: shared_by_heads(k_BGND, site.heads)
    if site.rotary is not None:
        queries, keys = Tap(module=site.rotary, take=_queries), Tap(module=site.rotary, take=_keys)
    elif site.keeps_qk:
        queries, keys = Tap(module=site.q_norm, take=_identity), Tap(module=site.k_norm, take=shared)
    else:
        queries = Tap(module=site.first, take=_rows(site, 0, site.heads))
        keys = Tap(module=site.first, take=_then(_rows(site, site.heads * site.qk, site.groups), shared))
    return HeadTaps(
        name=site.name,
        queries=queries,
        keys=keys,
        output=site.last,
        merge=site.merge,
        causal=site.causal,
        plane_scale=site.scale if site.in_planes else None,
    )
