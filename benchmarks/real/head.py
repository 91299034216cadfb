"""The saliency head on a DINOv2's patch tokens, which is never changed."""

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional


class SaliencyHead(nn.Module):
    """A map from normed patch tokens [B,N,C], N a square, to saliency [B,S,S] in [0,1] at the images' size."""

    def __init__(self, widths: Sequence[int] = (384, 256, 128, 64), patch: int = 14) -> None:
        super().__init__()
        self.patch, self.stages = patch, len(widths) - 1
        for stage, (inner, outer) in enumerate(pairwise(widths), 1):
            self.add_module(f"upconv{stage}", nn.ConvTranspose2d(inner, outer, 4, stride=2, padding=1))
            self.add_module(f"bn{stage}", nn.BatchNorm2d(outer))
        self.final_conv = nn.Conv2d(widths[-1], 1, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        grid = isqrt(tokens.shape[1])
        maps = tokens.transpose(1, 2).unflatten(2, (grid, grid))
        for stage in range(1, self.stages + 1):
            upsampled = self.get_submodule(f"upconv{stage}")(maps)
            maps = functional.relu(self.get_submodule(f"bn{stage}")(upsampled))
        size = (grid * self.patch, grid * self.patch)
        scaled = functional.interpolate(self.final_conv(maps), size=size, mode="bilinear", align_corners=False)
        return torch.sigmoid(scaled).squeeze(1)


def load_head(path: Path) -> SaliencyHead:
    """Load the head of a file, in evaluation mode."""
    return head_of(load_file(path))


def head_of(state: dict[str, Tensor]) -> SaliencyHead:
    """Return the head with these weights, in evaluation mode."""
    stages = sum(name.startswith("upconv") and name.endswith(".weight") for name in state)
    kernels = [state[f"upconv{stage}.weight"] for stage in range(1, stages + 1)]
    head = SaliencyHead([kernels[0].shape[0], *(kernel.shape[1] for kernel in kernels)])
    head.load_state_dict(state)
    return head.eval()
