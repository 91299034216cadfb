"""Merging the channels of an MLP instead of dropping some (folding, and GRAIL's recovery of it).

Rows of the first layer are clustered by k-means and each cluster becomes its mean row. What the second layer then gets
is the activation of a mean row, not the mean of activations: see reduce_folded.py for what that loses.

Legend: F channels, I inputs of the first layer, O outputs of the second, K clusters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """The first layer with one row per cluster, and the second with the sum of each cluster's columns.

    cluster_F: the cluster of each channel, numbered by its lowest channel; map_KF: rows that average a cluster.
    """

    cluster_F: Tensor
    map_KF: Tensor
    weight_KI: Tensor
    bias_K: Tensor
    plain_OK: Tensor


def _seeds(distance_FF: Tensor, width: int, seed: int) -> Tensor:
    """k-means++: each next centre drawn with odds of its squared distance to the nearest so far; no two coincide."""
    generator = torch.Generator("cpu").manual_seed(seed)
    picks = [int(torch.randint(distance_FF.shape[0], (1,), generator=generator, device="cpu"))]
    nearest_F = distance_FF[picks[0]].clone()
    while len(picks) < width:
        nearest_F[picks] = 0.0
        if float(nearest_F.sum()) > 0.0:
            pick = int(torch.multinomial(nearest_F.cpu(), 1, generator=generator))
        else:  # as many distinct rows as centres: any row not yet taken
            pick = next(i for i in range(distance_FF.shape[0]) if i not in picks)
        picks.append(pick)
        nearest_F = torch.minimum(nearest_F, distance_FF[pick])
    return torch.tensor(picks, device=distance_FF.device)


def _numbered(cluster_F: Tensor) -> Tensor:
    """Clusters renumbered by their lowest channel, so that the numbering says nothing about the seeding."""
    names: dict[int, int] = {}
    return cluster_F.new_tensor([names.setdefault(cluster, len(names)) for cluster in cluster_F.tolist()])


def _mean_map(cluster_F: Tensor, width: int) -> Tensor:
    """[K, F] with rows that average a cluster's channels."""
    member_KF = torch.nn.functional.one_hot(cluster_F, width).T.to(torch.float64)
    return member_KF / member_KF.sum(dim=1, keepdim=True)


def cluster_rows(rows_FI: Tensor, width: int, *, seed: int) -> Tensor:
    """k-means of the rows, every column scaled to unit variance: [F] of cluster numbers, no cluster empty.

    Deterministic for a seed. A cluster that loses its last member takes the row farthest from its own centre.
    """
    assert 0 < width <= rows_FI.shape[0], (width, rows_FI.shape)
    deviation_I = rows_FI.std(dim=0, correction=0)
    scaled_FI = (rows_FI - rows_FI.mean(dim=0)) / torch.where(deviation_I > 0.0, deviation_I, 1.0)
    square_F = scaled_FI.square().sum(dim=1)
    distance_FF = (square_F[:, None] + square_F - 2.0 * scaled_FI @ scaled_FI.T).clamp_min(0.0)
    centre_KI = scaled_FI[_seeds(distance_FF, width, seed)]
    cluster_F = torch.full((rows_FI.shape[0],), -1, device=rows_FI.device)
    for _ in range(_ROUNDS):
        distance_FK = square_F[:, None] + centre_KI.square().sum(dim=1) - 2.0 * scaled_FI @ centre_KI.T
        own_F, new_F = distance_FK.min(dim=1)
        size_K = new_F.bincount(minlength=width)
        for empty in (size_K == 0).nonzero().squeeze(1).tolist():
            far = int(torch.where(size_K[new_F] > 1, own_F, -torch.inf).argmax())
            size_K[new_F[far]] -= 1
            size_K[empty] += 1
            new_F[far], own_F[far] = empty, 0.0
        if torch.equal(new_F, cluster_F):
            break
        cluster_F = new_F
        centre_KI = _mean_map(cluster_F, width) @ scaled_FI
    return _numbered(cluster_F)


def fold(weight_FI: Tensor, first_bias_F: Tensor | None, weight_OF: Tensor, width: int, *, seed: int = 0) -> Folding:
    """Merge F channels into `width`: mean rows, and for each the sum of what its members fed into the output."""
    cluster_F = cluster_rows(weight_FI, width, seed=seed)
    map_KF = _mean_map(cluster_F, width)
    return Folding(
        cluster_F=cluster_F,
        map_KF=map_KF,
        weight_KI=map_KF @ weight_FI,
        bias_K=weight_FI.new_zeros(width) if first_bias_F is None else map_KF @ first_bias_F,
        plain_OK=weight_OF @ (map_KF > 0.0).to(torch.float64).T,
    )
