"""Small modules as people write them, with their inputs: what sites are found in."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, HEADS, TOKENS = 16, 2, 6


class Residual(nn.Module):
    def __init__(self, body: nn.Module, *, dim: int = D) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(dim), body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class NanoAttention(nn.Module):
    """Fused, causal, in chunks, as nanoGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(D, dim=2)
        k, q, v = (each.view(B, T, HEADS, C // HEADS).transpose(1, 2) for each in (k, q, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Nano(nn.Module):
    """A head that has the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, D), nn.Embedding(TOKENS, D)
        mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.attn, self.mlp, self.norm = Residual(NanoAttention()), Residual(mlp), nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, 20, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        return self.lm_head(self.norm(self.mlp(self.attn(x))))


class OwnAttention(nn.Module):
    """nn.MultiheadAttention over itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.head = nn.MultiheadAttention(D, HEADS, batch_first=True), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attn(x, x, x, need_weights=False)[0])


class EinsumAttention(nn.Module):
    """Every product by letters, scores scaled by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D // HEADS)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return self.out(mixed.flatten(2))


class Grouped(nn.Module):
    """Four heads of queries, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(D, 16), nn.Linear(D, 8), nn.Linear(D, 8), nn.Linear(16, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Rotary(nn.Module):
    """Queries and keys turned by a table, the halves of each head against one another."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        angles = torch.outer(torch.arange(TOKENS), 1 / 10 ** torch.arange(0, 1, 2 / (D // HEADS)))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = (each * self.cos + self._turned(each) * self.sin for each in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    @staticmethod
    def _turned(x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat((-two, one), -1)


class Relative(nn.Module):
    """A bias for each head and distance, attention spelled out."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.table = nn.Parameter(torch.randn(2 * TOKENS - 1, HEADS))
        places = torch.arange(TOKENS)
        self.register_buffer("index", places[:, None] - places[None] + TOKENS - 1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (C // HEADS) ** -0.5) @ k.transpose(-2, -1) + self.table[self.index].permute(2, 0, 1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


class Masked(nn.Module):
    """One table that is added to the scores of all heads, of as many places as a head has dimensions."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 6 * TOKENS), nn.Linear(2 * TOKENS, D)
        self.register_buffer("mask", torch.randn(TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, TOKENS)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Decomposed(nn.Module):
    """Positions by row and column that queries are multiplied with, as SAM and MViTv2 have them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.rows, self.columns = (nn.Parameter(torch.randn(count, count, D // HEADS)) for count in (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4).reshape(3, B * HEADS, N, -1).unbind(0)
        placed = q.reshape(-1, 2, 3, C // HEADS)
        rows = torch.einsum("bhwc,hkc->bhwk", placed, self.rows)[..., None]
        columns = torch.einsum("bhwc,wkc->bhwk", placed, self.columns)[..., None, :]
        given = F.scaled_dot_product_attention(q, k, v, attn_mask=(rows + columns).reshape(-1, N, N))
        return self.out(given.view(B, HEADS, N, -1).transpose(1, 2).reshape(B, N, C))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 24), nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Glu(nn.Module):
    """One half of what a layer writes gates the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 48), nn.Linear(24, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.up(x)))


class UNet(nn.Module):
    """What is wide goes around what is narrow, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.three, self.out = nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.one(x))
        narrow = F.relu(self.two(F.max_pool2d(wide, 2)))
        both = torch.cat((wide, F.interpolate(narrow, scale_factor=2)), 1)
        return self.out(F.relu(self.three(both)))


class TwoInputs(nn.Module):
    """Two towers that are added up; several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 12), nn.Linear(5, 12), nn.Linear(12, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        hidden = F.relu(self.left(left) + self.right(right))
        return {"logits": self.last(hidden), "mean": self.last(hidden).mean(-1)}


class Twice(nn.Module):
    """One layer called twice: it writes once, and what it writes is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.last(F.relu(self.again(F.relu(self.again(x)))))


class Squeezed(nn.Module):
    """Depthwise convolution, and squeeze and excitation, between two pointwise ones."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.reduce, self.excite, self.project = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.depthwise(F.silu(self.norm(self.expand(x)))))
        gate = self.excite(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()
        return self.project(x * gate)


class ResBlocks(nn.Module):
    """A stream that two blocks add to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Shuffled(nn.Module):
    """Groups of channels, shuffled in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 1, groups=3), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.channel_shuffle(F.relu(self.two(F.relu(self.one(x)))), 3))


def encoder() -> nn.Module:
    """torch's own, with a head."""
    layer = nn.TransformerEncoderLayer(D, HEADS, 32, batch_first=True, dropout=0.1)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(D, 3))
