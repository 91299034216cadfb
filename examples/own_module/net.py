"""A net of no library's, and the function that names where it is to be reduced: what `--model module:...` is given.

corp-deploy inspect --model module:examples/own_module/net.py:build --trust-code
"""

import torch
from torch import Tensor, nn

import corp_deploy


class Mix(nn.Module):
    """Self-attention, spelled in its own way."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.to_qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, dim=-1))
        scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        mixed: Tensor = self.out((scores @ v).transpose(1, 2).flatten(2))
        return mixed


class Layer(nn.Module):
    """Attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.mix, self.ffn = Mix(width, heads), nn.Sequential(nn.Linear(width, 96), nn.SiLU(), nn.Linear(96, width))
        self.even, self.level = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.even(x))
        out: Tensor = x + self.ffn(self.level(x))
        return out


class Net(nn.Module):
    """Images in patches of 8 pixels, to five classes."""

    def __init__(self, width: int = 48, heads: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 8, stride=8)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.say = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.say(self.layers(self.cut(images).flatten(2).transpose(1, 2)).mean(dim=1))
        return logits


def build(depth: int = 2) -> nn.Module:
    """The net with its weights, its sites named; arguments come from --model-kwargs."""
    torch.manual_seed(0)
    net = Net(depth=depth)
    return corp_deploy.sites(
        net,
        inputs=(3, 32, 32),
        mlps={f"layers.{i}.ffn": ("0", "2") for i in range(depth)},
        attentions={f"layers.{i}.mix": {"qkv": "to_qkv", "proj": "out", "heads": 3} for i in range(depth)},
    )
