"""The saliency head that reads a DINOv2's patch tokens; it is never reduced, and never told what was."""

from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional


class SaliencyHead(nn.Module):
    """Patch tokens after the last norm [B,256,384] to saliency in [0,1], [B,224,224]."""

    def __init__(self, widths: tuple[int, ...] = (384, 256, 128, 64), grid: int = 16, side: int = 224) -> None:
        super().__init__()
        self.grid, self.side, self.stages = grid, side, len(widths) - 1
        for stage, (inner, outer) in enumerate(pairwise(widths), 1):
            self.add_module(f"upconv{stage}", nn.ConvTranspose2d(inner, outer, 4, stride=2, padding=1))
            self.add_module(f"bn{stage}", nn.BatchNorm2d(outer))
        self.final_conv = nn.Conv2d(widths[-1], 1, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        maps = tokens.transpose(1, 2).unflatten(2, (self.grid, self.grid))
        for stage in range(1, self.stages + 1):
            upsampled = self.get_submodule(f"upconv{stage}")(maps)
            maps = functional.relu(self.get_submodule(f"bn{stage}")(upsampled))
        size = (self.side, self.side)
        scaled = functional.interpolate(self.final_conv(maps), size=size, mode="bilinear", align_corners=False)
        return torch.sigmoid(scaled).squeeze(1)


def load_head(path: Path) -> SaliencyHead:
    """From its weights, in eval mode."""
    head = SaliencyHead()
    missing = head.load_state_dict(load_file(path), strict=False).missing_keys
    if any("num_batches_tracked" not in name for name in missing):
        raise KeyError(f"{path}: no {', '.join(missing)}")
    return head.eval()
