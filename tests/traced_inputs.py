"""Small modules that take more than one image and give more than one tensor, with data for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ground.ports import Role

D, TOKENS, WORDS = 32, 12, 50
SOURCE = """
from tests.traced_inputs import MODULES

def make(name):
    return MODULES[name]()
"""


class Block(nn.Module):
    """Tokens that aren't there are never attended to."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        mask = None if there is None else there.bool()[:, None, None]
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Encoder(nn.Module):
    """Ids with their mask, to a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Parameter(0.1 * torch.randn(TOKENS, D))
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(D, 5)
        self.inputs = dict.fromkeys(("ids", "attention_mask"), torch.zeros(TOKENS, dtype=torch.int64))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor | None]:
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x, attention_mask)
        share = attention_mask / attention_mask.sum(1, keepdim=True)
        pooled = (x * share[..., None]).sum(1)
        return {"logits": self.head(pooled), "embedding": pooled, "states": None}


@dataclass
class Scored:
    scores: Tensor
    features: Tensor
    kept: Tensor


class Towers(nn.Module):
    """Vectors and images, joined, to a dataclass, of which two are asked for. A graph has a `meta` of its own."""

    outputs: Mapping[str, Role] = {"features": "embedding", "scores": "logits"}

    def __init__(self) -> None:
        super().__init__()
        self.meta = nn.Sequential(nn.Linear(9, 48), nn.GELU(), nn.Linear(48, D))
        self.right = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, D, 3, 2, 1))
        self.score = nn.Linear(D, 4)
        self.inputs = {"pixels": (3, 16, 16), "vector": (9,)}

    def forward(self, vector: Tensor, pixels: Tensor) -> Scored:
        joined = torch.tanh(self.meta(vector) + self.right(pixels).mean((2, 3)))
        return Scored(scores=self.score(joined), features=joined, kept=joined.argmax(-1))


class Windows(nn.Module):
    """A series of vectors to a tuple, whose names are said."""

    inputs: Mapping[str, Any] = {"series": (TOKENS, 6)}
    outputs = ("tokens", "pooled")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, D), Block(), nn.Linear(D, 3)

    def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
        x = self.block(self.first(series))
        return self.last(x), x.mean(1)


MODULES: Mapping[str, type[nn.Module]] = {kind.__name__: kind for kind in (Encoder, Towers, Windows)}


def arrays(name: str, count: int, seed: int) -> dict[str, NDArray[Any]]:
    """By the names of a module's inputs."""
    generator = np.random.default_rng(seed)
    if name == "Encoder":
        lengths = generator.integers(3, TOKENS, count)
        mask = (np.arange(TOKENS) < lengths[:, None]).astype(np.int64)
        return {"ids": generator.integers(1, WORDS, (count, TOKENS)) * mask, "attention_mask": mask}
    inputs: Any = MODULES[name]().inputs
    return {key: generator.standard_normal((count, *shape), dtype=np.float32) for key, shape in inputs.items()}
