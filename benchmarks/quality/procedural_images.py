"""Images of 64x64 pixels with textured shapes, of 24 classes, made by formula and equal on every machine.

A class is one of 6 textures (stripes, checks, dots, rings, waves, grain) in one of 4 shapes (disc, square, triangle,
ring). Place, size, turn, scale of the texture, both colours, the background's slope and the noise are drawn per image.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IMAGE_SIZE = 64
SEEDS = {"train": 1, "held-out": 2}
WAVELENGTHS = (7.0, 12.0)
Grid = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Images [N,3,64,64], roughly in [-1, 1], labels [N], and wavelengths [N] of the textures in pixels."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    wavelengths: NDArray[np.float64]


def _dots(u: Grid, v: Grid) -> Grid:
    return np.where(np.cos(u) + np.cos(v) > 0.6, 1.0, -1.0)


# Functions of the turned coordinates [64,64], in radians of the wavelength, with values in [-1, 1].
TEXTURES: dict[str, Callable[[Grid, Grid], Grid]] = {
    "stripes": lambda u, v: np.sign(np.sin(u)),
    "checks": lambda u, v: np.sign(np.sin(u) * np.sin(v)),
    "dots": _dots,
    "rings": lambda u, v: np.sign(np.sin(np.hypot(u, v))),
    "waves": lambda u, v: np.sin(u + 2.0 * np.sin(0.5 * v)),
    "grain": lambda u, v: np.sin(u * np.cos(0.37 * v)) * np.cos(v * np.sin(0.73 * u)),
}

# Masks of the shapes, by coordinates in which the radius is 1.
SHAPES: dict[str, Callable[[Grid, Grid], NDArray[np.bool_]]] = {
    "disc": lambda x, y: np.hypot(x, y) < 1.0,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) < 0.85,
    "triangle": lambda x, y: (y > -0.6) & (np.abs(x) * 1.75 + y < 1.2),
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.75) < 0.35,
}
CLASSES = tuple(f"{texture} {shape}" for texture in TEXTURES for shape in SHAPES)


def _image(label: int, random: np.random.Generator) -> tuple[NDArray[np.float32], float]:
    """Return an image and the wavelength of its texture."""
    texture, shape = CLASSES[label].split()
    axis = np.arange(IMAGE_SIZE) - (IMAGE_SIZE - 1) / 2
    y, x = np.meshgrid(axis, axis, indexing="ij")
    radius = random.uniform(22.0, 27.0)
    centre_x, centre_y = random.uniform(-2.5, 2.5, 2)
    turn, lean = random.uniform(0.0, 2.0 * np.pi), random.uniform(-0.15, 0.15)
    inside = SHAPES[shape](*_turned((x - centre_x) / radius, (y - centre_y) / radius, lean))
    wavelength = random.uniform(*WAVELENGTHS)
    wave = 2.0 * np.pi / wavelength
    pattern = TEXTURES[texture](*_turned((x - centre_x) * wave, (y - centre_y) * wave, turn))
    front, contrast, back = random.uniform(-0.4, 0.4, 3), random.uniform(0.35, 0.6, 3), random.uniform(-0.7, 0.7, 3)
    slope = (x * random.normal() + y * random.normal()) / IMAGE_SIZE * 0.5
    textured = front[:, None, None] + (contrast * random.choice([-1.0, 1.0]))[:, None, None] * pattern
    image = np.where(inside, textured, back[:, None, None] + slope)
    noisy = image + random.uniform(0.03, 0.15) * random.normal(size=image.shape)
    return np.asarray(noisy, dtype=np.float32), wavelength


def _turned(x: Grid, y: Grid, angle: float) -> tuple[Grid, Grid]:
    cos, sin = np.cos(angle), np.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def made(part: str, count: int) -> Labelled:
    """Return the first images of `train` or `held-out`; an image depends only on its part and number."""
    if part not in SEEDS:
        raise ValueError(f"part of the procedural images: got {part!r}, expected one of {', '.join(SEEDS)}")
    images = np.empty((count, 3, IMAGE_SIZE, IMAGE_SIZE), dtype=np.float32)
    labels = np.empty(count, dtype=np.int64)
    wavelengths = np.empty(count)
    for number in range(count):
        random = np.random.default_rng([SEEDS[part], number])
        labels[number] = random.integers(len(CLASSES))
        images[number], wavelengths[number] = _image(int(labels[number]), random)
    return Labelled(images=images, labels=labels, wavelengths=wavelengths)
