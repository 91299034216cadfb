"""Photographs in packages, and crops of them; sets are split by photograph, never by crop.

The first 53 are large. Many of the 290 others, listed in more_photographs.json, are small, so their crops have at least
128 pixels. Drawn and abstract pictures of the packages are excluded, and so are near-duplicates by calib's perceptual
hashes. Every crop is square, 0.3 to 1 of the short side, anywhere in the photograph, resized to 224 pixels, and half of
them are mirrored. Crops take turns over the photographs in a new order each time, so that the first crops have every
photograph about equally often.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.real.place import ROOT
from ground.errors import Missing

SIDE = 224
MEAN, STD = np.array((0.485, 0.456, 0.406), np.float32), np.array((0.229, 0.224, 0.225), np.float32)
SHARES, LEAST_OF_MORE = (0.3, 1.0), 128
BACKGROUNDS, MATE = "debian/usr/share/backgrounds", "debian/usr/share/backgrounds/mate/nature"
PLASMA, SKIMAGE, SKLEARN = "debian/usr/share/wallpapers", "wheels/skimage/data", "wheels/sklearn/datasets/images"


def _plasma(*names: str) -> tuple[str, ...]:
    return tuple(f"{PLASMA}/{name}/contents/images/2560x1600.jpg" for name in names)


CALIBRATION = (
    *(f"{MATE}/{name}.jpg" for name in ("Aqua", "Blinds", "Dune", "Garden", "GreenMeadow", "LadyBird", "TwoWings")),
    f"{MATE}/Wood.jpg",
    *(f"{BACKGROUNDS}/{name}.jpg" for name in ("Bridge_by_Sander_Klootwijk", "Infinite-Sea_by_Aury88")),
    *(f"{BACKGROUNDS}/{name}_by_Aitzol_Berasategi.jpg" for name in ("friends", "life", "picosdeeuropa")),
    *(f"{BACKGROUNDS}/Picture_{name}_by_freespace.jpg" for name in ("0B", "1A")),
    *(f"{BACKGROUNDS}/{name}_by_Peter_Nerlich.jpg" for name in ("free", "greentock")),
    f"{BACKGROUNDS}/Wine_by_Jakkub_Mede.jpg",
    *_plasma("BytheWater", "ColorfulCups", "EveningGlow", "FallenLeaf", "Grey", "OneStandsOut", "Path", "summer_1am"),
    *(f"{SKIMAGE}/{name}.png" for name in ("astronaut", "brick", "camera", "chelsea", "coffee", "gravel", "ihc")),
    *(f"{SKIMAGE}/{name}" for name in ("hubble_deep_field.jpg", "motorcycle_left.png", "rocket.jpg")),
    f"{SKLEARN}/china.jpg",
)
HELD_OUT = (
    *(f"{MATE}/{name}.jpg" for name in ("FreshFlower", "RainDrops", "Storm", "YellowFlower")),
    *(f"{BACKGROUNDS}/{name}_by_Aitzol_Berasategi.jpg" for name in ("aitzgorri", "sunset")),
    *(f"{BACKGROUNDS}/{name}.jpg" for name in ("Dragonfly_by_Bolly", "Kleiber_by_Lukas_Baubkus")),
    f"{BACKGROUNDS}/seeding_by_Clements_Engelhardt.jpg",
    *_plasma("ColdRipple", "DarkestHour", "Kite"),
    *(f"{SKIMAGE}/{name}" for name in ("coins.png", "grass.png", "retina.jpg")),
    f"{SKLEARN}/flower.jpg",
)
_MORE = json.loads(Path(__file__).with_name("more_photographs.json").read_text(encoding="utf-8"))
MORE_CALIBRATION, MORE_HELD_OUT = (
    tuple(f"debian/{name}" for name in _MORE[part]) for part in ("calibration", "held_out")
)
EVERY_CALIBRATION = (*CALIBRATION, *MORE_CALIBRATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crops:
    """Normalised images [N,3,224,224], and the photograph of each."""

    images: NDArray[np.float32]
    photographs: tuple[str, ...]


def files(names: Sequence[str], root: Path = ROOT) -> tuple[Path, ...]:
    """Return the paths of photographs. Raises Missing if some are absent."""
    paths = tuple(root / name for name in names)
    if absent := [path for path in paths if not path.is_file()]:
        raise Missing(f"{absent[0]}: {len(absent)} of {len(paths)} photographs are not here; `make real` brings them")
    return paths


def _crop(picture: Image.Image, random: np.random.Generator, least: int) -> NDArray[np.float32]:
    """Return a normalised crop [3,224,224], of at least this many pixels a side if the photograph is large enough."""
    edge = max(round(min(picture.size) * random.uniform(*SHARES)), min(least, *picture.size))
    left, top = (int(random.integers(size - edge + 1)) for size in picture.size)
    box = (left, top, left + edge, top + edge)
    small = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
    if random.random() < 0.5:
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    scaled = (np.asarray(small, np.float32) / 255.0 - MEAN) / STD
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def rounds(count: int, photographs: int, seed: int) -> NDArray[np.int64]:
    """Return the photograph of each crop: rounds over all photographs, each in a new order."""
    random = np.random.default_rng(seed)
    turns = [random.permutation(photographs) for _ in range(-(-count // photographs))]
    return np.concatenate(turns)[:count]


def crops(names: Sequence[str], count: int, seed: int, root: Path = ROOT) -> Crops:
    """Return crops of these photographs, which depend only on the seed."""
    paths, order = files(names, root), rounds(count, len(names), seed)
    images, more = np.empty((count, 3, SIDE, SIDE), np.float32), {*MORE_CALIBRATION, *MORE_HELD_OUT}
    for index, path in enumerate(paths):
        random = np.random.default_rng([seed, index])
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        for position in np.flatnonzero(order == index):
            images[position] = _crop(picture, random, LEAST_OF_MORE if names[index] in more else 0)
    return Crops(images=images, photographs=tuple(Path(names[index]).as_posix() for index in order))
