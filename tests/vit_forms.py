"""Small instances of every form that timm builds its VisionTransformer in."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import nn

from calib.images import Images
from calib.moments import Moments
from corp_deploy.families.architecture import Architecture
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny

SMALL: dict[str, Any] = {
    "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7, "img_size": 32, "patch_size": 8
}  # fmt: skip
FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "packed gate": ("vit_giant_patch14_dinov2", SMALL | {"mlp_ratio": 4.0}),
    "gate apart": ("aimv2_large_patch14_224", SMALL | {"mlp_ratio": 2.0}),
    "gate behind a norm": ("vitamin_small_224", {"depth": 2, "num_classes": 7, "img_size": 32, "num_heads": 3}),
}


def architecture(form: str, **changes: Any) -> Architecture:
    name, kwargs = FORMS[form]
    return Architecture(name=name, kwargs=kwargs | changes)


@cache
def checkpoint(form: str) -> Checkpoint:
    """Random weights that are large enough to matter."""
    torch.manual_seed(0)
    named = architecture(form)
    model = dense_from_architecture(named)
    tiny.enliven(model, 0)
    return Checkpoint(model=model, architecture=named, lineage={})


def opened(model: nn.Module, count: int = 24, seed: int = 0, size: int = 32) -> Images:
    return tiny.opened(Path(mkdtemp()) / "images.npy", tiny.images(count, seed, size), model)


@cache
def moments(form: str) -> Moments:
    model = checkpoint(form)
    return calibrate(model, opened(model.model), batch_size=8, statistics=Statistics(attention_system=True))


def method(preset: str = "best", **changes: Any) -> Method:
    asked = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8, **changes}
    return method_from_preset(preset, **asked)
