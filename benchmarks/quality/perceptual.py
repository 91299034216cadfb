"""Which pictures `calib.fingerprints` takes for the same: copies saved again, other photographs, other digits.

    make real && python -m benchmarks.quality.perceptual --output benchmarks/results/perceptual.json

Crops of real photographs, split by photograph, saved again as JPEG, some at another size; and digits of 8 x 8 pixels,
which hold so little that a few look alike. Distances are bits of 128.
"""

import io
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.real.place import assembled
from calib.fingerprints import ALIKE, BITS, perceptual_hashes
from corp_deploy.machine import versions
from examples.digits.images import load
from ground.files import write_json

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
AGAIN = ((90, 224), (75, 224), (50, 224), (85, 160), (85, 320))  # quality, side


def saved_again(image: Tensor, quality: int, side: int) -> Tensor:
    """A preprocessed crop as JPEG of that size, read back at its own."""
    pixels = ((image * STD + MEAN).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    file, size = io.BytesIO(), pixels.shape[:2]
    Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=quality)
    again = np.array(Image.open(file).resize(size, Image.Resampling.BICUBIC))
    return (torch.from_numpy(again).permute(2, 0, 1) / 255 - MEAN) / STD


def distances(images: Tensor, others: Tensor) -> Tensor:
    """Bits in which each differs from each of the others [N,M]."""
    one, other = (((h[:, :, None] >> torch.arange(64)) & 1).flatten(1).float() for h in (images, others))
    return one @ (1 - other).T + (1 - one) @ other.T


def nearest(images: Tensor, others: Tensor) -> dict[str, Any]:
    """How near images come to others, none of which is the same."""
    least = distances(images, others).amin(1)
    return {
        "images": len(images),
        "others": len(others),
        "least": int(least.min()),
        "alike": int((least <= ALIKE).sum()),
    }


def measured(held_out: Tensor, fitted: Tensor, digits: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """All figures."""
    own = perceptual_hashes(held_out)
    copies = []
    for quality, side in AGAIN:
        again = perceptual_hashes(torch.stack([saved_again(image, quality, side) for image in held_out]))
        bits = distances(again, own).diagonal()
        share = float((bits <= ALIKE).float().mean())
        copies.append({"quality": quality, "side": side, "alike": share, "median": float(bits.median())})
    return {
        "bits": BITS,
        "alike_within": ALIKE,
        "copies": copies,
        "photographs": nearest(own, perceptual_hashes(fitted)),
        "digits": nearest(*(perceptual_hashes(part) for part in digits)),
    }


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(output: Path) -> None:
    held_out, fitted = (
        torch.from_numpy(np.load(assembled() / f"{name}.npy").astype("f4")) for name in ("held", "calib")
    )
    digits = (torch.from_numpy(load("held-out").images), torch.from_numpy(load("train").images))
    found = measured(held_out, fitted, digits)
    write_json(output, {"kind": "benchmarks/perceptual", "version": 1, "versions": versions(), **found}, indent=1)


if __name__ == "__main__":
    main()
