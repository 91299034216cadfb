"""A rotation inside each head that leaves the result unchanged and evens out the ranges of its channels.

For any orthogonal R, queries R A q and keys R B k give the same logits as A q and B k, and an output projection W R'
reads R V v with the same result as W reads V v. With R a Hadamard matrix over the root of its size, every new channel
mixes all old ones with equal weight, so that channels have similar ranges, which one quantisation scale can serve
(QuaRot, arXiv 2404.00456, section 3).

Legend: H heads, D inputs of a map, R reduced width, K = H R, O outputs.
"""

import torch
from torch import Tensor


def is_rotatable(width: int) -> bool:
    """Return whether Sylvester's Hadamard matrix of this size exists and mixes channels: a power of two above 1."""
    return width > 1 and width & (width - 1) == 0


def hadamard(width: int, device: torch.device | None = None) -> Tensor:
    """Return Sylvester's Hadamard matrix over the root of its size, float64 [R, R]: orthogonal and symmetric."""
    assert is_rotatable(width), width
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device=device)
    whole = two
    while len(whole) < width:
        whole = torch.kron(two, whole)
    out_RR: Tensor = whole / width**0.5
    return out_RR


def rotate_maps(map_HRD: Tensor) -> Tensor:
    """Return R A for each head's map A [R,D]; the maps unchanged if `is_rotatable` is false for their width."""
    width = map_HRD.shape[1]
    return hadamard(width, map_HRD.device) @ map_HRD if is_rotatable(width) else map_HRD


def rotate_weight(weight_OK: Tensor, heads: int) -> Tensor:
    """Return W R' [O,K], which reads the rotated channels of all heads; W if `is_rotatable` is false for a head."""
    width = weight_OK.shape[1] // heads
    if not is_rotatable(width):
        return weight_OK
    back_OK: Tensor = (weight_OK.unflatten(1, (heads, width)) @ hadamard(width, weight_OK.device)).flatten(1)
    return back_OK
