"""The procedural images by torch, at any size and on any device: the formulas of
benchmarks/quality/procedural_images.py.

Every batch follows from its part, seed and number; the numbers drawn are not those of the 64x64 images, nor are a
GPU's those of a CPU. Classes are balanced within a batch, in random order.

Legend: B images, H height, W width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.procedural_images import CLASSES
from benchmarks.quality.procedural_images import IMAGE_SIZE as BASE
from benchmarks.quality.procedural_images import SHAPES as SHAPE_NAMES
from benchmarks.quality.procedural_images import TEXTURES as TEXTURE_NAMES

PARTS = ("train", "check", "held-out", "calibration")
DRAWN = 256
STEPS = 64.0  # per unit, when an image is kept in a byte: values lie within [-2, 2)


def _dots(u: Tensor, v: Tensor) -> Tensor:
    return torch.where(u.cos() + v.cos() > 0.6, 1.0, -1.0)


TEXTURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stripes": lambda u, v: u.sin().sign(),
    "checks": lambda u, v: (u.sin() * v.sin()).sign(),
    "dots": _dots,
    "rings": lambda u, v: torch.hypot(u, v).sin().sign(),
    "waves": lambda u, v: (u + 2.0 * (0.5 * v).sin()).sin(),
    "grain": lambda u, v: (u * (0.37 * v).cos()).sin() * (v * (0.73 * u).sin()).cos(),
}
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": lambda x, y: torch.hypot(x, y) < 1.0,
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) < 0.85,
    "triangle": lambda x, y: (y > -0.6) & (x.abs() * 1.75 + y < 1.2),
    "ring": lambda x, y: (torch.hypot(x, y) - 0.75).abs() < 0.35,
}
assert list(TEXTURES) == list(TEXTURE_NAMES), TEXTURES
assert list(SHAPES) == list(SHAPE_NAMES), SHAPES


@dataclass(frozen=True, slots=True)
class Draws:
    """Uniform numbers in a range for every image, in the shape that is asked for."""

    count: int
    generator: torch.Generator
    device: str

    def uniform(self, low: float, high: float, channels: int = 1) -> Tensor:
        shape = (self.count, channels, 1, 1)
        return low + (high - low) * torch.rand(shape, generator=self.generator, device=self.device)

    def normal(self) -> Tensor:
        return torch.randn((self.count, 1, 1, 1), generator=self.generator, device=self.device)


def _turned(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    return angle.cos() * x + angle.sin() * y, angle.cos() * y - angle.sin() * x


def _chosen(kinds: dict[str, Callable[[Tensor, Tensor], Tensor]], which: list[int], x: Tensor, y: Tensor) -> Tensor:
    """Each image's own kind; `which` ascends, so that every kind is computed for its images alone."""
    parts, start = [], 0
    for index, kind in enumerate(kinds.values()):
        stop = start + which.count(index)
        parts.append(kind(x[start:stop], y[start:stop]))
        start = stop
    return torch.cat(parts)


def batch(part: str, number: int, count: int, *, size: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images [B,3,size,size] float32, roughly in [-1, 1], and labels [B] int64, both on the device."""
    if part not in PARTS:
        raise ValueError(f"part of the procedural images: got {part!r}, expected one of {', '.join(PARTS)}")
    key = PARTS.index(part) + len(PARTS) * (seed + 1000 * number)
    draws = Draws(count, torch.Generator(device).manual_seed(key), device)
    labels = sorted(index % len(CLASSES) for index in range(count))
    scale = size / BASE
    axis = (torch.arange(size, device=device) - (size - 1) / 2) / scale  # in pixels of the 64x64 images
    x, y = axis.view(1, 1, 1, size), axis.view(1, 1, size, 1)
    radius, lean = draws.uniform(22.0, 27.0), draws.uniform(-0.15, 0.15)
    centre_x, centre_y = draws.uniform(-2.5, 2.5), draws.uniform(-2.5, 2.5)
    inside = _in_shape(labels, *_turned((x - centre_x) / radius, (y - centre_y) / radius, lean))
    wave, turn = 2.0 * math.pi / draws.uniform(7.0, 12.0), draws.uniform(0.0, 2.0 * math.pi)
    textures = [label // len(SHAPES) for label in labels]
    pattern = _chosen(TEXTURES, textures, *_turned((x - centre_x) * wave, (y - centre_y) * wave, turn))
    contrast = draws.uniform(0.35, 0.6, 3) * torch.where(draws.uniform(-1.0, 1.0) < 0.0, -1.0, 1.0)
    textured = draws.uniform(-0.4, 0.4, 3) + contrast * pattern
    slope = (x * draws.normal() + y * draws.normal()) / BASE * 0.5
    images = torch.where(inside, textured, draws.uniform(-0.7, 0.7, 3) + slope)
    noise = torch.randn(images.shape, generator=draws.generator, device=device)
    images = images + draws.uniform(0.03, 0.15) * noise
    order = torch.randperm(count, generator=draws.generator, device=device)
    return images[order], torch.tensor(labels, device=device)[order]


def _in_shape(labels: list[int], x: Tensor, y: Tensor) -> Tensor:
    """All shapes for all images, as they are cheap, and each image's own of them."""
    every = torch.stack([shape(x, y) for shape in SHAPES.values()])
    which = torch.tensor([label % len(SHAPES) for label in labels], device=x.device)
    return every[which, torch.arange(len(labels), device=x.device)]


def held_in_bytes(part: str, count: int, *, size: int, device: str, seed: int = 0) -> Tensor:
    """The first `count` images in host memory, a byte a value (page-locked where there is a GPU)."""
    host = torch.empty(count, 3, size, size, dtype=torch.uint8, pin_memory=device == "cuda")
    for number, start in enumerate(range(0, count, DRAWN)):
        images, _ = batch(part, number, DRAWN, size=size, device=device, seed=seed)
        stop = min(start + DRAWN, count)
        host[start:stop] = bytes_from_images(images[: stop - start]).cpu()
    return host


def bytes_from_images(images: Tensor) -> Tensor:
    return (images * STEPS + 128.0).round().clamp(0, 255).to(torch.uint8)


def images_from_bytes(held: Tensor, device: str) -> Tensor:
    """[B,3,H,W] float32 on the device; the copy carries bytes and doesn't make the host wait."""
    return held.to(device, non_blocking=True).float().sub_(128.0).div_(STEPS)


def labelled(part: str, count: int, *, size: int, device: str) -> tuple[Tensor, Tensor]:
    """The first `count` images and labels, on the device."""
    made = [batch(part, n, DRAWN, size=size, device=device) for n in range(math.ceil(count / DRAWN))]
    images, labels = (torch.cat(each)[:count] for each in zip(*made, strict=True))
    return images, labels
