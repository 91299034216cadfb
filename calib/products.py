"""Sums over tokens: float32 products of one image at a time, float64 sums over images.

Each product spans the tokens of one image, at most CHUNK of them, so no float32 sum is longer than CHUNK terms and
nothing depends on which images share a batch: batch size and order move the results by float64 rounding only.

Shapes: B images, N tokens, F channels, H heads, D dims.
"""

import torch
from torch import Tensor

CHUNK = 512
TILE = 192


def add_gram(total_FF: Tensor, x_BNF: Tensor) -> None:
    """Adds sum of x x^T to the block rows of total_FF on and above the diagonal, `mirror` fills the rest.

    Half the multiplications of the full product: block row i starts at its diagonal block.
    """
    for x_NF in x_BNF:
        for x_nF in torch.split(x_NF, CHUNK):
            for start in range(0, total_FF.shape[0], TILE):
                rows = slice(start, start + TILE)
                total_FF[rows, start:].add_(x_nF[:, rows].float().T @ x_nF[:, start:].float())


def mirror(total_FF: Tensor) -> None:
    """Copies the upper block rows that `add_gram` keeps onto the lower half, in place."""
    for start in range(0, total_FF.shape[0], TILE):
        stop = start + TILE
        total_FF[stop:, start:stop] = total_FF[start:stop, stop:].T


def add_sum(total_F: Tensor, x_BNF: Tensor) -> None:
    """Adds the sum over images and tokens."""
    total_F.add_(x_BNF.float().sum(1).double().sum(0))


def add_active(total_F: Tensor, x_BNF: Tensor, eps: float) -> None:
    """Adds the number of entries with |x| > eps; counts are whole, so nothing is rounded."""
    for x_NF in x_BNF:
        total_F.add_((x_NF.abs() > eps).sum(0))


def grams_of_heads(x_BHND: Tensor) -> Tensor:
    """x^T x of each image and head, [B,H,D,D] float32."""
    return torch.stack([sum_of_chunks(x_HND) for x_HND in x_BHND])


def sum_of_chunks(x_HND: Tensor) -> Tensor:
    products = [(x_HnD.mT @ x_HnD) for x_HnD in torch.split(x_HND.float(), CHUNK, dim=1)]
    return products[0] if len(products) == 1 else torch.stack(products).sum(0)


def half(x_DD: Tensor) -> Tensor:
    """Entries on and above the diagonal of the last two dims, row-major: [..., D(D+1)/2]."""
    rows, columns = torch.triu_indices(x_DD.shape[-1], x_DD.shape[-1], device=x_DD.device)
    return x_DD[..., rows, columns]
