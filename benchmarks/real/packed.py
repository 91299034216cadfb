"""Real weights and crops in a small form, for machines without a network.

    make real
    python -m benchmarks.real.packed --output build/packed

Weights are in half precision and compressed without loss, crops are JPEGs: about 50 MB instead of 480. The unpacked
model with rounded weights is the dense model of all comparisons.
"""

import json
import lzma
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load, load_file, save
from torch import Tensor, nn

from benchmarks.real.head import SaliencyHead, head_of
from benchmarks.real.photographs import MEAN, STD
from benchmarks.real.place import assembled
from benchmarks.real.weights import ARCHITECTURE
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from ground.errors import Missing
from ground.files import write_json
from ground.records import record_from_file

KIND = "benchmarks/real-packed"
ABOUT, WEIGHTS, HEAD = "packed.json", "model.safetensors.xz", "head.safetensors.xz"
SETS = ("calib", "held")
QUALITY = 88
# Values have two bytes, and the upper ones are similar.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crops:
    """Pixels [N,3,S,S] uint8 and the photograph of each."""

    pixels: NDArray[np.uint8]
    photographs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """An encoder, the head on its patch tokens, calibration crops and held-out crops."""

    dense: Checkpoint
    head: SaliencyHead
    calibration: Crops
    held_out: Crops


def _write_half(state: Mapping[str, Tensor], path: Path) -> None:
    half = {name: each.half() if each.is_floating_point() else each for name, each in state.items()}
    path.write_bytes(lzma.compress(save(half), filters=FILTERS))


def _read_half(path: Path) -> dict[str, Tensor]:
    state = load(lzma.decompress(path.read_bytes()))
    return {name: each.float() if each.is_floating_point() else each for name, each in state.items()}


def pixels_of(images: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the pixels of normalised images [N,3,S,S]."""
    values = (images * STD[:, None, None] + MEAN[:, None, None]) * 255.0
    pixels: NDArray[np.uint8] = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return pixels


def normalised(pixels: NDArray[np.uint8]) -> Tensor:
    """Return normalised images of pixels [N,3,S,S]."""
    return torch.from_numpy((pixels.astype(np.float32) / 255.0 - MEAN[:, None, None]) / STD[:, None, None])


def pack(ready: Path, output: Path, architecture: Architecture = ARCHITECTURE) -> None:
    """Pack the files of `ready` into `output`. Raises Missing if there are none."""
    if not (ready / "dinov2_s.safetensors").is_file():
        raise Missing(f"{ready}: no real weights here; `make real` brings them")
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_half(load_file(ready / "dinov2_s.safetensors"), partial / WEIGHTS)
    _write_half(load_file(ready / "head.safetensors"), partial / HEAD)
    groups = {}
    for name in SETS:
        (partial / name).mkdir()
        for number, image in enumerate(np.load(ready / f"{name}.npy", mmap_mode="r")):
            picture = Image.fromarray(pixels_of(image[None])[0].transpose(1, 2, 0))
            picture.save(partial / name / f"{number:04}.jpg", quality=QUALITY)
        groups[name] = json.loads((ready / f"{name}_groups.json").read_text(encoding="utf-8"))
    about = {"kind": KIND, "version": 1, "name": architecture.name, "kwargs": dict(architecture.kwargs)}
    write_json(partial / ABOUT, about | {"photographs": groups})
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)


def _crops(folder: Path, name: str, photographs: list[str]) -> Crops:
    pictures = []
    for number in range(len(photographs)):
        with Image.open(folder / name / f"{number:04}.jpg") as picture:
            pictures.append(np.asarray(picture.convert("RGB")).transpose(2, 0, 1))
    return Crops(pixels=np.stack(pictures), photographs=tuple(photographs))


def unpack(folder: Path) -> Unpacked:
    """Unpack a packed folder. Raises Missing if there is none."""
    if not (folder / ABOUT).is_file():
        raise Missing(
            f"{folder}: nothing packed here; `make real` and `python -m benchmarks.real.packed --output {folder.name}` "
            "make it on a machine with a network"
        )
    about = record_from_file(folder / ABOUT, dict[str, Any], kind=KIND)
    architecture = Architecture(name=about["name"], kwargs=about["kwargs"])
    model: nn.Module = dense_from_architecture(architecture)
    model.load_state_dict(_read_half(folder / WEIGHTS))
    calibration, held_out = (_crops(folder, name, about["photographs"][name]) for name in SETS)
    return Unpacked(
        dense=Checkpoint(model=model.requires_grad_(False), architecture=architecture, lineage={}),
        head=head_of(_read_half(folder / HEAD)),
        calibration=calibration,
        held_out=held_out,
    )


@click.command(help=__doc__)
@click.option("--ready", type=click.Path(path_type=Path, file_okay=False), default=assembled())
@click.option("--output", "-o", type=click.Path(path_type=Path, file_okay=False), required=True)
def main(ready: Path, output: Path) -> None:
    try:
        pack(ready, output)
    except Missing as reason:
        raise click.ClickException(str(reason)) from None
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    click.echo(f"{output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
