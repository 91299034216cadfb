"""A self-made set for dense prediction: mosaics of textures with a class for each patch, and a linear head on
patch tokens.

B images, N patches of each, C channels, K classes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.quality.procedural_images import TEXTURES

CELLS = 4  # cells of a mosaic's side
WAVELENGTHS = (9.0, 22.0)  # of 224 pixels a side
RIDGE_REL = 1e-2
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mosaics:
    """images [B,3,S,S] as DINOv2 takes them; classes [B,N], the texture's number at each patch."""

    images: Tensor
    classes: Tensor


def _cell(texture: int, side: int, scale: float, random: np.random.Generator) -> NDArray[np.float64]:
    """Pixels [3,side,side] in [0,1]: a texture between two colours, turned and shifted anyhow."""
    y, x = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    turn, shift = random.uniform(0.0, 2.0 * np.pi), random.uniform(0.0, 100.0, 2)
    wave = 2.0 * np.pi / (random.uniform(*WAVELENGTHS) * scale)
    u = wave * (np.cos(turn) * x - np.sin(turn) * y + shift[0])
    v = wave * (np.sin(turn) * x + np.cos(turn) * y + shift[1])
    share = (list(TEXTURES.values())[texture](u, v) + 1.0) / 2.0
    one, other = random.uniform(0.0, 1.0, (2, 3, 1, 1))
    return np.asarray(one * share + other * (1.0 - share), dtype=np.float64)


def mosaics(count: int, *, size: int, patch: int, seed: int) -> Mosaics:
    """Drawn anew, the same for the same seed; the patches of a side are a multiple of the cells of one."""
    grid, side = size // patch, size // CELLS
    assert grid % CELLS == 0, (size, patch)
    random = np.random.default_rng(seed)
    textures = random.integers(0, len(TEXTURES), (count, CELLS, CELLS))
    images = np.empty((count, 3, size, size))
    for image, row, column in np.ndindex(textures.shape):
        place = (image, slice(None), slice(row * side, (row + 1) * side), slice(column * side, (column + 1) * side))
        images[place] = _cell(int(textures[image, row, column]), side, size / 224, random)
    mean, deviation = (np.asarray(values)[:, None, None] for values in (MEAN, DEVIATION))
    classes = textures.repeat(grid // CELLS, axis=1).repeat(grid // CELLS, axis=2).reshape(count, -1)
    return Mosaics(
        images=torch.from_numpy(((images - mean) / deviation).astype(np.float32)), classes=torch.from_numpy(classes)
    )


def linear_head(patches_BNC: Tensor, classes_BN: Tensor) -> nn.Linear:
    """The linear classifier of patch tokens by ridge regression on the classes' indicators, float64."""
    x_RC, count = patches_BNC.flatten(0, 1).double(), len(TEXTURES)
    target_RK = nn.functional.one_hot(classes_BN.flatten(), count).double()
    mean_C, mean_K = x_RC.mean(dim=0), target_RK.mean(dim=0)
    gram_CC = (x_RC - mean_C).mT @ (x_RC - mean_C)
    ridge = RIDGE_REL * gram_CC.diagonal().mean()
    weight_CK = torch.linalg.solve(
        gram_CC + ridge * torch.eye(len(gram_CC), dtype=torch.float64), (x_RC - mean_C).mT @ (target_RK - mean_K)
    )
    head = nn.Linear(len(mean_C), count)
    with torch.no_grad():
        head.weight.copy_(weight_CK.mT)
        head.bias.copy_(mean_K - mean_C @ weight_CK)
    return head.requires_grad_(False)


def class_maps(head: nn.Linear, patches_BNC: Tensor) -> Tensor:
    """The likeliest class at each patch [B,N]."""
    classes_BN: Tensor = head(patches_BNC).argmax(dim=-1)
    return classes_BN
