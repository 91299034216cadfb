"""Other views of images that are fitted to: what the dense model makes of them is known, so none needs a label.

A few hundred images are soon known by heart; of views there is no end (a teacher that sees what the student sees:
Beyer et al., arXiv 2106.05237).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_LEAST_AREA = 0.35


def view(image_CHW: Tensor, seed: int, number: int) -> Tensor:
    """The image itself, or half of the time a part of it, 0.35 to all of its area, brought back to its size, half of
    those mirrored.

    The same for the same seed and number, wherever the image is.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    other, area, down, right, mirror = torch.rand(5, generator=generator).tolist()
    if other < 0.5:
        return image_CHW
    height, width = image_CHW.shape[-2:]
    side = (_LEAST_AREA + (1.0 - _LEAST_AREA) * area) ** 0.5
    tall, wide = max(1, round(height * side)), max(1, round(width * side))
    top, left = int(down * (height - tall + 1)), int(right * (width - wide + 1))
    part = image_CHW[:, top : top + tall, left : left + wide]
    whole = F.interpolate(part.unsqueeze(0), size=(height, width), mode="bilinear", align_corners=False)[0]
    return whole.flip(-1) if mirror < 0.5 else whole
