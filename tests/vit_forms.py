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
_TINY = "vit_tiny_patch16_224"
FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "class token": (_TINY, SMALL),
    "mean": (_TINY, SMALL | {"global_pool": "avg"}),
    "mean without a class token": (_TINY, SMALL | {"global_pool": "avg", "class_token": False, "fc_norm": False}),
    "maximum": (_TINY, SMALL | {"global_pool": "max"}),
    "mean and maximum": (_TINY, SMALL | {"global_pool": "avgmax"}),
    "attention pool": ("vit_base_patch16_siglip_224", SMALL),
    "attention pool without weights": (_TINY, SMALL | {"global_pool": "prr"}),
    "no pool": (_TINY, SMALL | {"global_pool": ""}),
    "no classes": (_TINY, SMALL | {"num_classes": 0}),
    "registers": ("vit_small_patch14_reg4_dinov2", SMALL),
    "distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "any image size": (_TINY, SMALL | {"dynamic_img_size": True}),
    "norm before": ("vit_base_patch16_clip_quickgelu_224", SMALL),
    "layer scale": ("deit3_small_patch16_224", SMALL | {"init_values": 0.1}),
    "q/k norm": (_TINY, SMALL | {"qk_norm": True}),
    # Its stem gives 384 channels; all else is as small as that allows.
    "gate behind a norm": (
        "vitamin_small_224",
        SMALL | {"embed_dim": 384, "num_heads": 24, "patch_size": 1, "mlp_ratio": 0.5},
    ),
    "packed gate": ("vit_giant_patch14_dinov2", SMALL | {"mlp_ratio": 4.0, "init_values": 0.1}),
    "gate apart": ("aimv2_large_patch14_224", SMALL | {"mlp_ratio": 2.0}),
    "residual post-norm": ("vit_base_patch16_rpn_224", SMALL | {"init_values": 0.5}),
    "side by side": ("vit_small_patch16_18x2_224", SMALL | {"init_values": 0.1}),
    "norms inside": ("beit3_base_patch16_224", SMALL),
    "difference of softmaxes": ("vit_dwee_patch16_reg1_gap_256", SMALL | {"init_values": 0.1}),
    "one layer for all": ("vit_base_patch16_xp_224", SMALL),
    "one layer for all, a difference": ("vit_dpwee_patch16_reg1_gap_256", SMALL),
}
SITES = {
    "attention pool": 9, "q/k norm": 4, "gate behind a norm": 12, "side by side": 12, "norms inside": 2,
    "difference of softmaxes": 8, "one layer for all": 4, "one layer for all, a difference": 8,
}  # fmt: skip
"""How many sites a form has, 6 unless it stands here."""


def architecture(form: str, **changes: Any) -> Architecture:
    name, kwargs = FORMS[form]
    return Architecture(name=name, kwargs=kwargs | changes)


@cache
def checkpoint(form: str, **changes: Any) -> Checkpoint:
    """Random weights that are large enough to matter."""
    torch.manual_seed(0)
    named = architecture(form, **changes)
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
