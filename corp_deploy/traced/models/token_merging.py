"""Token merging as modules: similar tokens become means weighted by size, or tokens are dropped; and unmerging.

Written from the paper (Bolya et al., ToMe, arXiv 2210.09461, section 3), in ops that export as TopK, GatherElements and
products with one-hot matrices, without Scatter.

Legend: B inputs, N tokens, P of them protected, in front; A and D the others at even and at odd places, the sets that
tokens are taken from and merged into; R tokens merged, K = A - R kept; C channels, X dimensions compared.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.spec.merging import How, Metric
from corp_deploy.traced.programs.exported import HIDDEN


class Tokens(NamedTuple):
    """A residual stream x [B,N,C] of merged tokens.

    `sizes`: the number of source tokens in each token (float32 [B,N]), None for one. `sources`: the index in x of the
    token that each source token is in (int64 [B,M]), -1 if it was dropped, None if not tracked.
    """

    x: Tensor
    sizes: Tensor | None = None
    sources: Tensor | None = None


class Match(NamedTuple):
    """The places of even tokens that are kept [B,K], ascending, and merged [B,R], and the mask of these [B,A].

    `into` [B,A]: the odd token that each even one is most similar to.
    """

    kept: Tensor
    merged: Tensor
    into: Tensor
    is_merged: Tensor


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _picked(x: Tensor, places: Tensor) -> Tensor:
    """Return x [B,N,C] or [B,N] at places [B,K]."""
    return x.gather(1, places if x.ndim == 2 else places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _is_among(places_BR: Tensor, count: int) -> Tensor:
    """Return the mask [B,count] of the tokens at these places."""
    return (places_BR.unsqueeze(-1) == _places(count, places_BR)).any(dim=1)


def _first(x_BN: Tensor, count: int, *, largest: bool) -> Tensor:
    """Return the places of the `count` largest or smallest, the first of equals first.

    A graph's TopK takes the first of equals by its definition; torch's own promises nothing, a stable sort does.
    """
    if torch.compiler.is_exporting():
        return x_BN.topk(count, dim=1, largest=largest, sorted=True).indices
    return torch.sort(x_BN, dim=1, descending=largest, stable=True).indices[:, :count]


def _others(is_out_BN: Tensor, kept: int) -> Tensor:
    """Return the places of the `kept` tokens that aren't out, ascending."""
    count = is_out_BN.shape[1]
    late_BN = is_out_BN.float() * count + _places(count, is_out_BN).float()
    return _first(late_BN, kept, largest=False)


def cosines(compared_BNX: Tensor, protected: int) -> Tensor:
    """Return the cosine of each even token with each odd one [B,A,D], in float32, as half is coarse near 1."""
    unit_BNX = F.normalize(compared_BNX[:, protected:].float(), dim=-1)
    return unit_BNX[:, 0::2] @ unit_BNX[:, 1::2].transpose(1, 2)


def ward(x_BNC: Tensor, sizes_BN: Tensor | None, protected: int) -> Tensor:
    """Return the negative cost of merging each even token with each odd one [B,A,D], in float32.

    The cost is what the merge adds to the sum of squares of source tokens about the tokens they are in:
    n m / (n + m) |x - y|^2 for sizes n and m (Ward 1963). To reduce rounding, the mean of every eighth token is
    subtracted, which changes no difference; the mean of all would take an engine three more kernels.
    """
    x_BNC = x_BNC.float()
    x_BNC = x_BNC - x_BNC[:, protected::8].mean(dim=1, keepdim=True)
    even_BAC, odd_BDC = x_BNC[:, protected::2], x_BNC[:, protected + 1 :: 2]
    # Few steps run on all A x D numbers: halves and reciprocals are taken of the N tokens.
    halves_BN = 0.5 * x_BNC.square().sum(dim=-1)
    even_BA1, odd_B1D = halves_BN[:, protected::2].unsqueeze(2), halves_BN[:, protected + 1 :: 2].unsqueeze(1)
    apart_BAD = even_BAC @ odd_BDC.transpose(1, 2) - even_BA1 - odd_B1D
    if sizes_BN is None:
        return apart_BAD
    parts_BN = 0.5 / sizes_BN
    return apart_BAD / (parts_BN[:, protected::2].unsqueeze(2) + parts_BN[:, protected + 1 :: 2].unsqueeze(1))


def attended(x_BNC: Tensor, attention_BN: Tensor, sizes_BN: Tensor | None, protected: int) -> Tensor:
    """Return `ward` times the sum of the roots of the class token's attention to both [B,A,D]."""
    roots_BN = attention_BN.float().sqrt()
    even_BA1, odd_B1D = roots_BN[:, protected::2].unsqueeze(2), roots_BN[:, protected + 1 :: 2].unsqueeze(1)
    return ward(x_BNC, sizes_BN, protected) * (even_BA1 + odd_B1D)


def token_similarity(
    metric: Metric, x_BNC: Tensor, compared: Tensor, sizes_BN: Tensor | None, protected: int
) -> Tensor:
    """Return the similarity of each even token to each odd one [B,A,D], larger if more similar."""
    if metric == "attended":
        return attended(x_BNC, compared, sizes_BN, protected)
    return ward(compared, sizes_BN, protected) if metric == "ward" else cosines(compared, protected)


def match_tokens(alike_BAD: Tensor, count: int) -> Match:
    """Match the `count` even tokens that are most similar to an odd one, the first of equals first."""
    best_BA, into_BA = alike_BAD.max(dim=-1)
    merged_BR = _first(best_BA, count, largest=True)
    is_merged_BA = _is_among(merged_BR, best_BA.shape[1])
    kept_BK = _others(is_merged_BA, best_BA.shape[1] - count)
    return Match(kept=kept_BK, merged=merged_BR, into=into_BA, is_merged=is_merged_BA)


def merge_tokens(tokens: Tokens, match: Match, protected: int) -> Tokens:
    """Merge tokens: return the protected, the kept even and the odd ones, these the means of all tokens in them.

    Tokens are weighted before they are summed, so that sums of many stay within the range of half precision.
    """
    x_BNC = tokens.x
    ones_BN = torch.ones(x_BNC.shape[:2], dtype=torch.float32, device=x_BNC.device)
    sizes_BN = ones_BN if tokens.sizes is None else tokens.sizes
    even_BAC, odd_BDC = x_BNC[:, protected::2], x_BNC[:, protected + 1 :: 2]
    even_BA, odd_BD = sizes_BN[:, protected::2], sizes_BN[:, protected + 1 :: 2]
    into_BR = _picked(match.into, match.merged)
    is_into_BDR = into_BR.unsqueeze(1) == _places(odd_BD.shape[1], into_BR).unsqueeze(-1)
    moved_BDR = is_into_BDR.float() * _picked(even_BA, match.merged).unsqueeze(1)
    total_BD = odd_BD + moved_BDR.sum(dim=-1)
    own_BD1 = (odd_BD / total_BD).unsqueeze(-1).to(x_BNC.dtype)
    shares_BDR = (moved_BDR / total_BD.unsqueeze(-1)).to(x_BNC.dtype)
    mean_BDC = odd_BDC * own_BD1 + shares_BDR @ _picked(even_BAC, match.merged)
    return Tokens(
        x=torch.cat([x_BNC[:, :protected], _picked(even_BAC, match.kept), mean_BDC], dim=1),
        sizes=torch.cat([sizes_BN[:, :protected], _picked(even_BA, match.kept), total_BD], dim=1),
        sources=None if tokens.sources is None else _update_sources(tokens.sources, match, protected, odd_BD.shape[1]),
    )


def _update_sources(sources_BM: Tensor, match: Match, protected: int, odd: int) -> Tensor:
    evens, kept = match.into.shape[1], match.kept.shape[1]
    even_BA = torch.where(match.is_merged, kept + match.into, _place_among(match.kept, evens))
    odd_BD = (kept + _places(odd, match.kept)).expand(even_BA.shape[0], -1)
    # Even and odd tokens by turns, as they stood before the merge.
    order = [token // 2 + (token % 2) * evens for token in range(evens + odd)]
    free_BN = (
        torch.cat([even_BA, odd_BD], dim=1).index_select(1, torch.tensor(order, device=even_BA.device)) + protected
    )
    return _behind_protected(free_BN, protected).gather(1, sources_BM)


def _place_among(kept_BK: Tensor, count: int) -> Tensor:
    """Return the index of each of `count` tokens among the kept ones [B,count], 0 for others."""
    is_place_BKN = kept_BK.unsqueeze(-1) == _places(count, kept_BK)
    return (is_place_BKN * _places(kept_BK.shape[1], kept_BK).unsqueeze(-1)).sum(dim=1)


def _behind_protected(places_BN: Tensor, protected: int) -> Tensor:
    return torch.cat([_places(protected, places_BN).expand(places_BN.shape[0], -1), places_BN], dim=1)


def drop_tokens(tokens: Tokens, attention_BN: Tensor, count: int, protected: int) -> Tokens:
    """Drop the `count` unprotected tokens of least attention, the first of equals first; sizes stay one."""
    free_BN = attention_BN[:, protected:].float()
    out_BR = _first(free_BN, count, largest=False)
    free = free_BN.shape[1]
    is_out_BN = _is_among(out_BR, free)
    kept_BK = _others(is_out_BN, free - count)
    x_BNC = tokens.x
    sources = tokens.sources
    if sources is not None:
        place_BN = _place_among(kept_BK, free) + protected
        places_BN = _behind_protected(torch.where(is_out_BN, -1, place_BN), protected)
        sources = torch.where(sources < 0, -1, places_BN.gather(1, sources.clamp(min=0)))
    return Tokens(x=torch.cat([x_BNC[:, :protected], _picked(x_BNC[:, protected:], kept_BK)], dim=1), sources=sources)


def unmerge_tokens(x_BNC: Tensor, sources_BM: Tensor) -> Tensor:
    """Return the stream [B,M,C] in which every source token has the value of the token that it is in."""
    if sources_BM.shape[0] != x_BNC.shape[0]:  # the sources of one input for several streams
        sources_BM = sources_BM.expand(x_BNC.shape[0], -1)
    return _picked(x_BNC, sources_BM)


def sources_of(x_BNC: Tensor) -> Tensor:
    """Return the `sources` [B,N] of a stream before any merge: each token's own index."""
    return _places(x_BNC.shape[1], x_BNC).expand(x_BNC.shape[0], -1)


def key_bias(weights_BN: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias [B,1,1,N] of scores [B,H,N,N] with which a key of weight n counts as n keys, of weight 0 as none.

    See ToMe, arXiv 2210.09461, equation 1. Weights of integer types are masks. A query whose keys are all hidden sees
    them alike, and stays finite.
    """
    if weights_BN.is_floating_point():
        bias_BN = weights_BN.float().log().clamp(min=HIDDEN).to(dtype)
    else:
        bias_BN = torch.zeros_like(weights_BN, dtype=dtype).masked_fill(weights_BN == 0, HIDDEN)
    return bias_BN[:, None, None, :]


class TokenMerge(nn.Module):
    """A module without weights that removes `count` tokens, and gives the stream, sizes and sources as Tokens.

    `compared` is [B,N,X] for the metric, or the class token's attention [B,N]. `follows`: source tokens are tracked
    from here on, even if they were not before.
    """

    def __init__(self, *, count: int, protected: int, how: How, metric: Metric = "ward", follows: bool = False) -> None:
        super().__init__()
        self.count, self.protected, self.how, self.follows = count, protected, how, follows
        self.metric: Metric = metric

    def forward(
        self, x: Tensor, sizes: Tensor | None, sources: Tensor | None, compared: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tokens = Tokens(x, sizes, sources_of(x) if sources is None and self.follows else sources)
        if self.how == "drop":
            return tuple(drop_tokens(tokens, compared, self.count, self.protected))  # type: ignore[return-value]
        match = match_tokens(token_similarity(self.metric, x, compared, sizes, self.protected), self.count)
        return tuple(merge_tokens(tokens, match, self.protected))  # type: ignore[return-value]


def find_merges(model: nn.Module) -> dict[str, TokenMerge]:
    """Return a model's token merges by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TokenMerge)}
