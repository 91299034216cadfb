"""Small models that no family knows: one written as people write theirs, and two of timm's."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from corp_deploy.families.given_module import architecture_of_code
from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.spec.trusted_code import Code, trusting_code
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture

SIDE = 32
CLASSES = 7
PVT = Architecture(
    name="pvt_v2_b0",
    kwargs={
        "depths": [1, 1], "embed_dims": [16, 32], "num_heads": [1, 2], "sr_ratios": [2, 1], "mlp_ratios": [4, 4],
        "num_classes": CLASSES, "img_size": SIDE,
    },
)  # fmt: skip
DENSENET = Architecture(
    name="densenet121", kwargs={"growth_rate": 16, "block_config": [2, 2], "num_classes": CLASSES, "img_size": SIDE}
)
CODE = "from tests.traced_examples import Patched as make\n"


class Attention(nn.Module):
    """One layer for queries, keys and values, taken apart by split and view; `shared` heads in turn have the same keys
    and values.
    """

    def __init__(self, dim: int, heads: int, shared: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(dim, dim + 2 * dim // shared), nn.Linear(dim, dim)
        self.heads, self.dim, self.shared = heads, dim, shared

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:2], -1, self.dim // self.heads)
        sizes = (self.dim, *[self.dim // self.shared] * 2)
        q, k, v = (each.view(size).transpose(1, 2) for each in self.c_attn(x).split(sizes, dim=2))
        if self.shared > 1:
            k, v = (each.repeat_interleave(self.shared, dim=1) for each in (k, v))
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(size[-1]), dim=-1)
        return self.c_proj((weights @ v).transpose(1, 2).contiguous().view(x.shape))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, shared: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(dim), Attention(dim, heads, shared), nn.LayerNorm(dim)
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_out(functional.gelu(self.c_fc(self.ln_2(x))))


class Patched(nn.Module):
    """Images to patches by two convolutions, through blocks, to the classes of the mean of all patches, or of the first
    that are read.
    """

    def __init__(
        self, dim: int = 48, heads: int = 3, depth: int = 2, classes: int = CLASSES, shared: int = 1, read: int = 0
    ) -> None:
        super().__init__()
        self.read = read
        self.input_size = (3, SIDE, SIDE)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, dim, 4, 4)
        )
        self.wpe = nn.Parameter(torch.zeros(1, (SIDE // 8) ** 2, dim))
        self.cut = nn.Identity()  # of the name that a tool might take for itself
        self.h = nn.ModuleList(Block(dim, heads, shared) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2) + self.wpe
        for block in self.h:
            x = self.cut(block(x))
        x = x[:, : self.read] if self.read else x
        return self.head(x.mean(dim=1))


@torch.no_grad()
def with_structure(model: nn.Module, seed: int = 0) -> nn.Module:
    """Layers whose channels are much alike, so that some tell of others."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            rows, columns = len(parameter), parameter[0].numel()
            rank = max(min(rows, columns) // 4, 1)
            mixed = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
            noise = 0.05 * torch.randn(rows, columns, generator=generator)
            parameter.copy_((mixed / (rank * columns) ** 0.5 + noise / columns**0.5).view_as(parameter))
        else:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def checkpoint_of(architecture: Architecture, seed: int = 0) -> Checkpoint:
    """With weights of some structure."""
    model = with_structure(dense_from_architecture(architecture), seed)
    return Checkpoint(model=model, architecture=architecture, lineage={})


def written_by(make: str, **arguments: Any) -> Checkpoint:
    """A module of one's own code, by what makes it, such as `tests.traced_examples.Patched`."""
    source = f"from {make.rpartition('.')[0]} import {make.rpartition('.')[2]} as make\n"
    code = Code(file="own.py", function="make", source=source)
    architecture = architecture_of_code(code, arguments, Preprocessing())
    torch.manual_seed(0)
    with trusting_code(True):
        return Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})


def images(count: int, seed: int) -> NDArray[np.float32]:
    """Smooth random images [count,3,32,32]."""
    coarse = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear").numpy()
