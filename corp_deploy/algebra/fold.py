"""K-means clusters of the channels of an MLP, or of heads, that are merged instead of dropped (folding).

Legend: F channels, I inputs of the first layer, K clusters.
"""

import torch
from torch import Tensor

_ROUNDS = 100


def _seeds(distance_FF: Tensor, width: int, seed: int) -> Tensor:
    """Draw by k-means++ the indices [K] of the rows that are the first centres; no row is drawn twice.

    A row's probability is proportional to its squared distance `distance_FF` to the nearest centre so far.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    picks = [int(torch.randint(distance_FF.shape[0], (1,), generator=generator, device="cpu"))]
    nearest_F = distance_FF[picks[0]].clone()
    while len(picks) < width:
        nearest_F[picks] = 0.0
        if float(nearest_F.sum()) > 0.0:
            pick = int(torch.multinomial(nearest_F.cpu(), 1, generator=generator))
        else:  # all distinct rows are centres: take any other row
            pick = next(i for i in range(distance_FF.shape[0]) if i not in picks)
        picks.append(pick)
        nearest_F = torch.minimum(nearest_F, distance_FF[pick])
    return torch.tensor(picks, device=distance_FF.device)


def averages(cluster_F: Tensor, width: int) -> Tensor:
    """Return the matrix [K,F] that averages the channels of each cluster: 1 / size for members, else 0; float64."""
    member_KF = torch.nn.functional.one_hot(cluster_F, width).T.to(torch.float64)
    return member_KF / member_KF.sum(dim=1, keepdim=True)


def cluster_rows(rows_FI: Tensor, width: int, *, seed: int) -> Tensor:
    """Cluster the rows by k-means, every column scaled to unit variance; return each row's cluster number [F], int64.

    The result depends only on the rows and the seed. A cluster that loses its last member gets the row that is farthest
    from its own centre, so none is empty.
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
        centre_KI = averages(cluster_F, width) @ scaled_FI
    # Clusters are numbered by their lowest channel, so that the numbers don't depend on the seeding.
    names: dict[int, int] = {}
    return cluster_F.new_tensor([names.setdefault(cluster, len(names)) for cluster in cluster_F.tolist()])
