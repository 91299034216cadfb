"""Small instances of the forms that timm builds its Eva in: most turn queries and keys by where tokens are."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import timm
import torch
from torch import nn

from calib.moments import Moments
from corp_deploy.families.architecture import Architecture
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny
from tests.vit_forms import SMALL, method, opened

SCALED = SMALL | {"init_values": 0.3}
FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "neighbours turned, packed gate": ("eva02_tiny_patch14_224", SMALL),
    "norms inside": ("eva02_base_patch16_clip_224", SMALL),
    "no positions in attention": ("eva_giant_patch14_224", SMALL | {"mlp_ratio": 4.0}),
    "norms behind": ("eva02_enormous_patch14_clip_224", SMALL | {"mlp_ratio": 4.0}),
    "halves turned, registers": ("vit_small_plus_patch16_dinov3", SCALED),
    "halves turned, biases": ("vit_small_patch16_dinov3_qkvb", SCALED),
    "learned angles": ("vit_base_patch16_rope_mixed_ape_224", SCALED),
    "attention pool": ("vit_pe_core_base_patch16_224", SMALL),
    "q/k norm, groups": ("vit_base_patch16_sapiens2", SCALED | {"num_kv_heads": (1, 3)}),
}
PLAIN = ("no positions in attention", "norms behind")
TURNED = tuple(form for form in FORMS if form not in (*PLAIN, "q/k norm, groups"))


def library(form: str, **changes: Any) -> nn.Module:
    """timm's own with random weights that are large enough to matter."""
    name, kwargs = FORMS[form]
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, **kwargs | changes).eval().requires_grad_(False)
    tiny.enliven(model, 0)
    return model


@cache
def checkpoint(form: str, **changes: Any) -> Checkpoint:
    """The same, whose sites are looked for."""
    name, kwargs = FORMS[form]
    architecture = Architecture(name=name, kwargs=kwargs | changes)
    model = dense_from_architecture(architecture)
    model.load_state_dict(library(form, **changes).state_dict())
    return Checkpoint(model=model.requires_grad_(False), architecture=architecture, lineage={})


@cache
def moments(form: str) -> Moments:
    model = checkpoint(form)
    return calibrate(model, opened(model.model), batch_size=8, statistics=Statistics(attention_system=True))


def shallow(form: str) -> Checkpoint:
    """One block, half of it."""
    whole = checkpoint(form, depth=1, **({"num_kv_heads": 1} if form == "q/k norm, groups" else {}))
    taken = calibrate(whole, opened(whole.model, 8), batch_size=8)
    narrower = reduce(whole.model, taken, method()).model
    return Checkpoint(model=narrower, architecture=whole.architecture, lineage={})


@cache
def reduced(form: str, preset: str = "best", **changes: Any) -> Reduction:
    return reduce(checkpoint(form).model, moments(form), method(preset, **changes))
