"""Sums over the pairs of queries and keys of attention; in causal attention a query sees keys up to its own position.

Of n tokens query i (from 1) sees i keys, key j is seen by n - j + 1 queries; sums over queries or keys alone weigh a
token by its number of pairs, times 2 / (n + 1), so the weights' sum is n. Keys are centred over what a query sees, as
softmax ignores a constant added to a query's logits.

Shapes: B inputs, H heads, N present tokens, n tokens of a block, D dims, S the K kept dims, P the removed ones, T pairs
of dims; where positions rotate q and k, X = D factors of D / 2 planes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ground.errors import BadInput

from .products import PassWeights, grams_of_heads, upper_triangle, weighted, weighted_by_root


def key_sums(k_BHND: Tensor, weights: PassWeights | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of each input's keys [B,H,D], their Grams [B,H,D,D], and the sum of centred Grams [H,D,D].

    The Grams are float64 and made of c = k - mean, which avoids cancellation: with r, the sum of c (near zero, as the
    mean is rounded), k'k = c'c + (n mean + r) mean' + mean r', and a Gram about the true mean is c'c - r r' / n.
    """
    if weights is None:
        count: int | Tensor = k_BHND.shape[2]
        mean_BH1D = k_BHND.float().mean(2, keepdim=True)
        c_BHND = torch.sub(k_BHND, mean_BH1D, out=torch.empty(k_BHND.shape, device=k_BHND.device))
    else:
        count = count_B11 = weights.weight_BN.double().sum(1)[:, None, None]
        divisor_B11 = torch.where(count_B11 > 0, count_B11, 1.0)
        mean_BH1D = weighted(k_BHND, weights).sum(2, keepdim=True) / divisor_B11.float()[..., None]
        c_BHND = k_BHND.float() - mean_BH1D
    gram_BHDD = grams_of_heads(weighted_by_root(c_BHND, weights))
    rest_BHD, mean_BHD = weighted(c_BHND, weights).sum(2).double(), mean_BH1D.squeeze(2).double()
    sum_BHD = mean_BHD * count + rest_BHD
    left_BHD2, right_BH2D = torch.stack([sum_BHD, mean_BHD], dim=-1), torch.stack([mean_BHD, rest_BHD], dim=-2)
    if weights is None:
        rest_HDD = rest_BHD.permute(1, 2, 0) @ rest_BHD.transpose(0, 1) / count
    else:
        rest_HDD = (rest_BHD / divisor_B11).permute(1, 2, 0) @ rest_BHD.transpose(0, 1)
    return sum_BHD, gram_BHDD + left_BHD2 @ right_BH2D, gram_BHDD.sum(0) - rest_HDD


BLOCK_ENTRIES = 2**23  # float64 numbers in the largest tensor of a block of queries: 64 MiB
PLANE_QUERIES = 64  # queries of an input from which gram_of_planes estimates the sum over all


def present_tokens(q_BHND: Tensor, k_BHND: Tensor, weights: PassWeights | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield queries and keys [H,N,D] of each input's present tokens, float64.

    Raises BadInput for weights other than 0 and 1, and for keys of another shape than the queries.
    """
    if q_BHND.shape != k_BHND.shape or q_BHND.ndim != 4:
        raise BadInput(
            f"causal attention: got queries {list(q_BHND.shape)} and keys {list(k_BHND.shape)}, expected "
            "[inputs, heads, tokens, dims] of both"
        )
    if weights is not None and not bool(((weights.weight_BN == 0) | (weights.weight_BN == 1)).all()):
        raise BadInput(
            "causal attention: got token weights other than 0 and 1, which don't say which tokens a query sees"
        )
    for index, (q_HND, k_HND) in enumerate(zip(q_BHND, k_BHND, strict=True)):
        if weights is not None:
            there_N = weights.weight_BN[index] > 0
            q_HND, k_HND = q_HND[:, there_N], k_HND[:, there_N]
        if q_HND.shape[1]:
            yield q_HND.double(), k_HND.double()


def sums_of_pairs(q_HND: Tensor, k_HND: Tensor) -> dict[str, Tensor]:
    count = q_HND.shape[1]
    seen_N = torch.arange(1, count + 1, dtype=torch.float64, device=q_HND.device)
    scale = 2.0 / (count + 1)
    of_query_N1, of_key_N1 = (scale * each.unsqueeze(1) for each in (seen_N, seen_N.flip(0)))
    c_HND = k_HND - k_HND.mean(dim=1, keepdim=True)  # avoids cancellation, and gives the same centred sums
    prefix_HND = c_HND.cumsum(dim=1)
    of_means_HDD = (prefix_HND * (scale / seen_N).unsqueeze(1)).mT @ prefix_HND
    return {
        "q_sum_HD": (q_HND * of_query_N1).sum(dim=1),
        "k_sum_HD": (k_HND * of_key_N1).sum(dim=1),
        "qq_HDD": (q_HND * of_query_N1).mT @ q_HND,
        "kk_HDD": (k_HND * of_key_N1).mT @ k_HND,
        "kk_centred_HDD": (c_HND * of_key_N1).mT @ c_HND - of_means_HDD,
        "energy_HD": (q_HND.square() * k_HND.square().cumsum(dim=1)).sum(dim=1),
    }


def _blocks(count: int, entries: int) -> Iterator[slice]:
    size = max(1, BLOCK_ENTRIES // max(1, entries))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def add_system_(total_HTT: Tensor, q_HNK: Tensor, k_HNK: Tensor) -> None:
    """Add the sum over queries i of upper(sum over keys j up to i of k_j k_j') upper(q_i q_i')', block by block."""
    heads, count, _ = q_HNK.shape
    before_H1T = total_HTT.new_zeros(heads, 1, total_HTT.shape[1])
    for block in _blocks(count, heads * total_HTT.shape[1]):
        q_HnT, k_HnT = (upper_triangle(x.unsqueeze(3) * x.unsqueeze(2)) for x in (q_HNK[:, block], k_HNK[:, block]))
        seen_HnT = before_H1T + k_HnT.cumsum(dim=1)
        total_HTT.baddbmm_(seen_HnT.mT, q_HnT)
        before_H1T = seen_HnT[:, -1:]


def add_target_(target_HKK: Tensor, energy_H: Tensor, q_HND: Tensor, k_HND: Tensor, kept_HK: Tensor) -> None:
    """Add (Q_S' L) K_S to the target, ||L||^2 to the energy; L is Q_P K_P' of the removed dims, 0 for unseen keys."""
    heads, count, _ = q_HND.shape
    is_left_out_H1D = torch.ones_like(q_HND[:, :1]).scatter_(2, kept_HK.unsqueeze(1), 0.0)
    at_HNK = kept_HK.unsqueeze(1).expand(-1, count, -1)
    q_HNK, k_HNK = q_HND.gather(2, at_HNK), k_HND.gather(2, at_HNK)
    for block in _blocks(count, heads * count):
        logits_HnN = (q_HND[:, block] * is_left_out_H1D) @ k_HND.mT
        logits_HnN = logits_HnN.tril(diagonal=block.start)
        target_HKK.add_(q_HNK[:, block].mT @ (logits_HnN @ k_HNK))
        energy_H.add_(logits_HnN.square().sum(dim=(1, 2)))


def plane_features(q: Tensor, k: Tensor) -> Tensor:
    """Return each plane's term of the logits, unrotated and rotated by 90 degrees: q0 k0 + q1 k1, q0 k1 - q1 k0."""
    (q0, q1), (k0, k1) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
    return torch.cat((q0 * k0 + q1 * k1, q0 * k1 - q1 * k0), dim=-1)


def gram_of_planes(q_HND: Tensor, k_HND: Tensor, scale: float) -> Tensor:
    """Return G [H,X,X], the cost of changing the planes' factors: the sum over queries of scale^2 / 2 Cov_p(f).

    f are the `plane_features` of a query with its keys, p is its attention. For a change x of the factors, x' G x is
    the KL divergence in nats to second order. At most PLANE_QUERIES queries count, evenly spread.
    """
    heads, count, dims = q_HND.shape
    chosen = sorted({(at + 1) * count // PLANE_QUERIES - 1 for at in range(PLANE_QUERIES)} - {-1})
    places = range(count) if count <= PLANE_QUERIES else chosen
    total_HXX = q_HND.new_zeros(heads, dims, dims)
    for place in places:
        q_H1D, k_HnD = q_HND[:, place : place + 1], k_HND[:, : place + 1]
        p_Hn1 = (scale * (k_HnD @ q_H1D.mT)).softmax(dim=1)
        f_HnX = plane_features(q_H1D, k_HnD)
        f_HnX -= (p_Hn1 * f_HnX).sum(dim=1, keepdim=True)
        total_HXX += (p_Hn1 * f_HnX).mT @ f_HnX
    return total_HXX * (0.5 * scale**2 * count / len(places))
