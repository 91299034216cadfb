"""A vision transformer small enough for tests, with heads as they come out of a reduction."""

from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from export.graph.to_onnx import onnx_from_model
from export.graph.weights import declared_types
from ground.ports import LOGITS, Port, image_port

SHAPE = (3, 32, 32)


def export(model: nn.Module, precision: str = "fp32", port: Port | None = None, **options: Any) -> onnx.ModelProto:
    """The graph of a classifier of such images, or of another input."""
    given = {"metadata": {}, **options}
    return onnx_from_model(model, [port or image_port(SHAPE)], [LOGITS], precision=precision, **given)


def images(batch: int, seed: int = 1) -> NDArray[np.float32]:
    """Such images, random ones [batch, *SHAPE]."""
    return np.random.default_rng(seed).standard_normal((batch, *SHAPE)).astype(np.float32)


def input_types(proto: onnx.ModelProto, *operators: str) -> set[int | None]:
    """ONNX's types of what these operators read first."""
    types = declared_types(onnx.shape_inference.infer_shapes(proto).graph)
    return {types.get(node.input[0]) for node in proto.graph.node if node.op_type in operators}


class Attention(nn.Module):
    """MatMul-Softmax-MatMul; q and k of width `qk` are zero-padded to `v` when `padded`."""

    def __init__(self, dim: int, heads: int, qk: int, v: int, padded: bool) -> None:
        super().__init__()
        self.heads, self.qk, self.v, self.padded = heads, qk, v, padded
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, heads * (2 * qk + v))
        self.proj = nn.Linear(heads * v, dim)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).split([self.heads * self.qk, self.heads * self.qk, self.heads * self.v], dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        if self.padded:
            q, k = (pad(part, (0, self.v - self.qk)) for part in (q, k))
        scores = (q * self.scale) @ k.transpose(-2, -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        mixed: Tensor = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, qk: int, v: int, hidden: int, padded: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn, self.mlp = Attention(dim, heads, qk, v, padded), Mlp(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Vit(nn.Module):
    """[B,3,S,S] -> [B,classes]; random weights of the given seed."""

    def __init__(
        self,
        *,
        dim: int = 64,
        heads: int = 2,
        qk: int = 32,
        v: int = 32,
        hidden: int = 128,
        depth: int = 2,
        size: int = 32,
        patch: int = 8,
        classes: int = 10,
        padded: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.patch = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, qk, v, hidden, padded) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits
