"""Weights, head and crops, made of the packages that lie unpacked: what real_vit.py starts from."""

import json
import shutil
from pathlib import Path

import click
import numpy as np
import onnx
from safetensors.torch import save_file

from benchmarks.real import lite0, photographs, weights
from benchmarks.real.place import assembled

CALIBRATION_CROPS, HELD_OUT_CROPS = 512, 128
CHOICES = (
    ("calib", photographs.CALIBRATION, CALIBRATION_CROPS, 0),
    ("held", photographs.HELD_OUT, HELD_OUT_CROPS, 1),
)


def assemble(root: Path) -> None:
    """Everything under `ready`, whole or not at all: about half a minute, 480 MB."""
    directory = assembled(root).with_suffix(".partial")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    graph = onnx.load(weights.graph_file(root))
    save_file(weights.backbone(graph), directory / "dinov2_s.safetensors")
    save_file(weights.head(graph), directory / "head.safetensors")
    save_file(lite0.state(root), directory / lite0.WEIGHTS)
    for name, names, count, seed in CHOICES:
        crops = photographs.crops(names, count, seed, root)
        np.save(directory / f"{name}.npy", crops.images)
        (directory / f"{name}_groups.json").write_text(json.dumps(crops.photographs, indent=0))
        click.echo(f"{assembled(root) / name}.npy: {count} crops of {len(names)} photographs")
    shutil.rmtree(assembled(root), ignore_errors=True)
    directory.rename(assembled(root))
