"""A reduced sublayer's outputs as a linear function of small changes of its first layer, where the reduced stream is.

Legend: B inputs of a pair, N tokens, X tokens that count, C channels of the stream, D channels and a one, K inputs of
the last layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from corp_deploy.algebra.gauss_newton import Lacking
from corp_deploy.algebra.tangents import ChannelTangent, HeadTangent, RunTangent, with_one
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.head_attention import rows_by_head
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.site import LinearSite
from corp_deploy.families.steps import Branch
from corp_deploy.families.token_merging import key_bias
from corp_deploy.reduction.streams import Pair

_CACHED_BYTES = 2**30


def _entering(site: LinearSite, x_BNC: Tensor) -> Tensor:
    """The first layers' inputs, with a one that carries their bias where they have one."""
    return x_BNC if site.first.bias is None else with_one(x_BNC)


class _Heard(Exception):
    """Ends a layer whose rest is not asked for."""


def last_through_scale(branch: Branch, site: LinearSite) -> Tensor:
    """The last layer's weight as it enters the residual stream, through the layer scale [C,K]."""
    weight_CK: Tensor = site.last.weight.detach()
    return weight_CK if branch.scale_C is None else weight_CK * branch.scale_C[:, None]


def _slope(layer: nn.Module, firsts: Sequence[nn.Linear], last: nn.Linear, entering_1XC: Tensor) -> Tensor:
    """The derivative of each hidden channel by what the rows R of the first layers give it [1,X,R]: what lies between
    the layers works channel by channel.
    """
    given_1XR = torch.cat([first(entering_1XC) for first in firsts], dim=-1).detach().requires_grad_()
    heard: list[Tensor] = []

    def stop(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        heard.append(inputs[0])
        raise _Heard

    handles = [last.register_forward_pre_hook(stop)]
    try:
        with torch.enable_grad():
            for first, given in zip(firsts, given_1XR.split([each.out_features for each in firsts], -1), strict=True):
                handles.append(first.register_forward_hook(lambda *_, given=given: given))
            with suppress(_Heard):
                layer(entering_1XC)
            (slope_1XR,) = torch.autograd.grad(heard.pop().sum(), given_1XR)
    finally:
        for handle in handles:
            handle.remove()
    return slope_1XR


def _tangent(branch: Branch, site: ChannelSite, entering_BNC: Tensor) -> ChannelTangent:
    """Of channels by channel and token."""
    return ChannelTangent(
        entering_XD=_entering(site, entering_BNC).flatten(0, 1),
        slope_XR=_slope(branch.layer, site.firsts, site.last, entering_BNC).flatten(0, 1),
        last_OR=last_through_scale(branch, site).repeat(1, site.rows),
    )


def _of_channels(branch: Branch, site: ChannelSite, pair: Pair) -> Lacking:
    """Of the tokens read alone: each stands for itself."""
    entering_BNC = pair.rows(branch.entering(pair.reduced), branch.read)
    weights_BN = pair.row_weights(branch.read)
    tangent = _tangent(branch, site, entering_BNC)
    carried_BNC = branch.carried(pair.reduced)
    before_BNC, target_BNC = (pair.rows(branch.rows(x), branch.read) for x in (carried_BNC, pair.target))
    lacking_BNC = target_BNC - before_BNC - added(branch, site, entering_BNC)
    weight_X = None if weights_BN is None else weights_BN.flatten()
    return Lacking(tangent=tangent, lacking_XO=lacking_BNC.flatten(0, 1), weight_X=weight_X)


def added(branch: Branch, site: ChannelSite, entering_BNC: Tensor) -> Tensor:
    """What an MLP adds to the stream for what is behind the branch's norm."""
    out_BNC: Tensor = branch.layer(entering_BNC)
    return out_BNC if branch.scale_C is None else out_BNC * branch.scale_C


def counts(branch: Branch, pair: Pair) -> Tensor:
    """How much each token of the reduced stream counts behind the branch [B,N]; 0 where it isn't read or there."""
    is_read_N = torch.ones(pair.target.shape[1], device=pair.reduced.device)
    if branch.read is not None:
        is_read_N = torch.zeros_like(is_read_N).index_fill_(0, branch.read, 1.0)
    present_BN = pair.present_BN
    is_read_BN = is_read_N.expand(len(pair.reduced), -1)
    if present_BN is None or present_BN.shape != is_read_BN.shape:  # as of what is pooled
        return is_read_BN
    return is_read_BN * present_BN.to(is_read_BN)


def _of_heads(branch: Branch, site: HeadSite, pair: Pair) -> Lacking:
    """All tokens are seen, those read alone count."""
    entering_BNC = branch.entering(pair.reduced)
    widths = (site.heads * site.qk, site.heads * site.qk, site.heads * site.v)
    q, k, v = (rows_by_head(rows, site.heads) for rows in site.first(entering_BNC).split(widths, dim=-1))
    q, k = site.q_norm(q), site.k_norm(k)
    if site.rotary is not None:
        q, k = site.rotary(q, k)
    scores = site.scale * (q @ k.mT)
    if branch.mixes_tokens and pair.present_BN is not None:
        scores = scores + key_bias(pair.present_BN, scores.dtype)
    tangent = HeadTangent(
        entering_BND=_entering(site, entering_BNC),
        q_BHNQ=q,
        k_BHNQ=k,
        v_BHNV=v,
        chance_BHNN=scores.softmax(dim=-1),
        last_OK=last_through_scale(branch, site),
        scale=site.scale,
        values_only=site.keeps_qk,
    )
    behind_BNC = branch.through(branch.layer, pair.reduced, pair.present_BN)
    counts_BN1 = counts(branch, pair).unsqueeze(-1)
    # What lies beyond the tokens that count may be anything, and 0 times it isn't always 0.
    lacking_BNC = torch.where(counts_BN1 > 0.0, branch.added_to(pair.target - behind_BNC), 0.0)
    return Lacking(tangent=tangent, lacking_XO=lacking_BNC.flatten(0, 1), weight_X=counts_BN1.flatten())


_OF_KIND: Mapping[str, Callable[[Branch, Any, Pair], Lacking]] = MappingProxyType(
    {ChannelSite.kind: _of_channels, HeadSite.kind: _of_heads}
)


def _size(lacking: Lacking) -> int:
    tangent: Any = lacking.tangent
    tensors = (getattr(tangent, name) for name in tangent.__slots__)
    own = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
    return own + (tangent.held_bytes if isinstance(tangent, RunTangent) else 0)


class Linearised:
    """What is linear in small changes of a layer, on some pairs; what doesn't fit in a gigabyte is computed again at
    each look.
    """

    def __init__(self, look: Callable[[Pair], Lacking], pairs: Sequence[Pair]) -> None:
        self._look, self._pairs = look, pairs
        self._cached: dict[int, Lacking] = {}
        self._left = _CACHED_BYTES

    def _piece(self, index: int) -> Lacking:
        if index in self._cached:
            return self._cached[index]
        lacking = self._look(self._pairs[index])
        if (size := _size(lacking)) <= self._left:
            self._left -= size
            self._cached[index] = lacking
        return lacking

    def __iter__(self) -> Iterator[Lacking]:
        return map(self._piece, range(len(self._pairs)))


def linearised(branch: Branch, site: LinearSite, pairs: Sequence[Pair]) -> Linearised:
    """A branch by changes of its layer's first linear map."""
    return Linearised(partial(_OF_KIND[site.kind], branch, site), pairs)
