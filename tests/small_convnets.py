"""Small convolutional networks of timm's: timm's own, whose norms have met images, and ours with its weights."""

from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from calib.images import Images
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import timm_family_of
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny

SIZE = 48
_RESNET: dict[str, Any] = {"layers": [1, 1, 2, 1], "channels": [16, 16, 24, 32], "stem_width": 8}
_REGNET: dict[str, Any] = {"w0": 16, "wa": 24.0, "wm": 2.0, "depth": 6, "group_size": 8, "stem_width": 16}
SMALL: dict[str, dict[str, Any]] = {
    "resnet18": {**_RESNET, "channels": [64, 24, 32, 40], "stem_width": 64},
    "resnet18d": _RESNET,
    "resnet50": {**_RESNET, "stem_width": 64, "cardinality": 1},
    "resnet50d": _RESNET,
    "resnet26t": {**_RESNET, "stem_width": 16},
    "seresnet50": {**_RESNET, "stem_width": 64},
    "regnetx_002": _REGNET,
    "regnety_002": _REGNET,
    "regnetz_005": {**_REGNET, "bottle_ratio": 2.0, "num_features": 48},
    "resnext50_32x4d": {**_RESNET, "stem_width": 64, "cardinality": 4, "base_width": 32},
}


@cache
def library(name: str, size: int = SIZE) -> nn.Module:
    """timm's own model; statistics of norms are those of images, their weights are spread."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=7, **SMALL[name])
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = None  # a plain mean over batches
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(std=0.3)
        model.train()(pixels(64, seed=9, size=size))
    return model.eval().requires_grad_(False)


@cache
def checkpoint(name: str, size: int = SIZE) -> Checkpoint:
    """Ours, of the same weights."""
    kwargs = {"num_classes": 7, "img_size": size, **SMALL[name]}
    architecture = Architecture(name=name, kwargs=kwargs)
    model = dense_from_architecture(architecture)
    model.load_state_dict(timm_family_of(model).own_state(model, library(name, size).state_dict()))
    return Checkpoint(model=model.eval().requires_grad_(False), architecture=architecture, lineage={})


def pixels(count: int, seed: int = 0, size: int = SIZE) -> Tensor:
    return torch.from_numpy(tiny.images(count, seed, size))


def opened(model: nn.Module, count: int, path: Path, seed: int = 0) -> Images:
    return tiny.opened(path / f"images{seed}.npy", pixels(count, seed).numpy(), model)


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(images)
    return out.double()


def error(model: nn.Module, dense: nn.Module, images: Tensor) -> float:
    """Of the outputs, relative."""
    exact = outputs(dense, images)
    return float((outputs(model, images) - exact).norm() / exact.norm())
