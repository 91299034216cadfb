"""Modules of no library, as users write them; each declares its inputs."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, HEADS, TOKENS, WORDS = 48, 3, 16, 60
TEXT: Mapping[str, Any] = {"idx": torch.zeros(TOKENS, dtype=torch.int64)}
SERIES: Mapping[str, Any] = {"x": (TOKENS, D)}


class Residual(nn.Module):
    """Bodies that each add to a residual stream, behind a norm."""

    def __init__(self, *bodies: nn.Module) -> None:
        super().__init__()
        self.norms, self.bodies = nn.ModuleList(nn.LayerNorm(D) for _ in bodies), nn.ModuleList(bodies)

    def forward(self, x: Tensor) -> Tensor:
        for norm, body in zip(self.norms, self.bodies, strict=True):
            x = x + body(norm(x))
        return x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))


class Causal(nn.Module):
    """Causal attention by one fused layer for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(D, dim=2)
        k, q, v = (each.view(B, T, HEADS, C // HEADS).transpose(1, 2) for each in (k, q, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return out


class NanoGPT(nn.Module):
    """A small GPT: embeddings of tokens and positions, blocks, and a head for the last token."""

    inputs = TEXT

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, D), nn.Embedding(TOKENS, D)
        self.blocks = nn.Sequential(*(Residual(Causal(), mlp()) for _ in range(2)))
        self.norm, self.lm_head = nn.LayerNorm(D), nn.Linear(D, WORDS, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        out: Tensor = self.lm_head(self.norm(self.blocks(x))[:, -1])
        return out


class Tied(NanoGPT):
    """A GPT whose head shares the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.wte.weight


class TorchEncoder(nn.Module):
    """An encoder of torch.nn."""

    inputs = SERIES

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, HEADS, 4 * D, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(D, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).mean(1))
        return out


class Rearranged(nn.Module):
    """Attention with the rearrangement `b n (qkv h d) -> qkv b h n d`, in torch since einops is no dependency."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(x).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = torch.permute(qkv, (2, 0, 3, 1, 4)).unbind(0)
        weights = (torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1)
        out: Tensor = self.to_out(torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(x.shape))
        return out


class Lettered(nn.Module):
    """Attention whose products are einsums."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D // HEADS)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        out: Tensor = self.out(mixed.flatten(2))
        return out


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 128), nn.Linear(D, 128), nn.Linear(128, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Stack(nn.Module):
    """Two residual blocks, and a head for the mean token."""

    inputs = SERIES

    def __init__(self, *bodies: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(*(body() for body in bodies)) for _ in range(2)))
        self.head = nn.Linear(D, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x).mean(1))
        return out


def conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """A U-Net with two skip connections."""

    inputs: Mapping[str, Any] = {"x": (3, 32, 32)}

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList((conv(3, 16), conv(16, 32), conv(32, 64)))
        self.up = nn.ModuleList((nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)))
        self.join, self.out = nn.ModuleList((conv(64, 32), conv(32, 16))), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.down[2](F.max_pool2d(second, 2))
        for up, join, beside in zip(self.up, self.join, (second, first), strict=True):
            x = join(torch.cat((beside, up(x)), 1))
        out: Tensor = self.out(x)
        return out


class TwoInputs(nn.Module):
    """A tower for images and one for vectors, joined by a head."""

    inputs: Mapping[str, Any] = {"pixels": (3, 16, 16), "vector": (9,)}

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(conv(3, 16), conv(16, 32))
        self.vector = nn.Sequential(nn.Linear(9, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))

    def forward(self, pixels: Tensor, vector: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat((self.image(pixels).mean((2, 3)), self.vector(vector)), 1))
        return out


class SeveralOutputs(Stack):
    """A model with logits, a value for each token, and features."""

    def __init__(self) -> None:
        super().__init__(Causal, mlp)
        self.value = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.blocks(x)
        return {"logits": self.head(x.mean(1)), "values": self.value(x), "features": x.mean(1)}


class Twice(nn.Module):
    """A block that is called twice, between a first and a last layer."""

    inputs = SERIES

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(D, D), Residual(Causal(), mlp()), nn.Linear(D, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.block(self.block(self.first(x))).mean(1))
        return out


OWN: Mapping[str, Callable[[], nn.Module]] = {
    "nanoGPT": NanoGPT,
    "nn.TransformerEncoder": TorchEncoder,
    "einops style": lambda: Stack(Rearranged, mlp),
    "einsum attention": lambda: Stack(Lettered, mlp),
    "gated MLP": lambda: Stack(Causal, GatedMlp),
    "U-Net": UNet,
    "two inputs": TwoInputs,
    "several outputs": SeveralOutputs,
    "weight tying": Tied,
    "a block called twice": Twice,
}
