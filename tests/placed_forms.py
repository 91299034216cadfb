"""Small instances of timm's models whose attention is told where tokens are: Eva's forms."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import timm
import torch
from torch import Tensor, nn

from calib.moments import Moments
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import timm_family_of
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny
from tests.vit_forms import SMALL, method, opened

FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "neighbours turned, packed gate": ("eva02_tiny_patch14_224", SMALL),
    "norms inside": ("eva02_base_patch16_clip_224", SMALL),
    "no positions in attention": ("eva_giant_patch14_224", SMALL | {"mlp_ratio": 4.0}),
    "norms behind": ("eva02_enormous_patch14_clip_224", SMALL | {"mlp_ratio": 4.0}),
    "halves turned, registers": ("vit_small_plus_patch16_dinov3", SMALL | {"init_values": 0.3}),
    "halves turned, biases": ("vit_small_patch16_dinov3_qkvb", SMALL | {"init_values": 0.3}),
    "learned angles": ("vit_base_patch16_rope_mixed_ape_224", SMALL | {"init_values": 0.3}),
    "attention pool": ("vit_pe_core_base_patch16_224", SMALL),
    "q/k norm, groups": ("vit_base_patch16_sapiens2", SMALL | {"init_values": 0.3, "num_kv_heads": (1, 3)}),
}
ROTARY = tuple(form for form in FORMS if form not in ("no positions in attention", "norms behind"))
SITES = {"norms inside": 2, "q/k norm, groups": 3}
"""How many sites a form has, 4 unless it stands here."""


@cache
def dense(form: str, **changes: Any) -> tuple[nn.Module, Checkpoint]:
    """timm's own model with random weights, and ours with the same."""
    name, kwargs = FORMS[form]
    torch.manual_seed(0)
    raw: nn.Module = timm.create_model(name, **(kwargs | changes)).eval().requires_grad_(False)
    tiny.enliven(raw, 0)
    architecture = Architecture(name=name, kwargs=kwargs | changes)
    ours = dense_from_architecture(architecture)
    family = timm_family_of(ours)
    ours.load_state_dict(family.own_state(ours, family.adapted_state(ours, raw.state_dict())))
    return raw, Checkpoint(model=ours.requires_grad_(False), architecture=architecture, lineage={})


def checkpoint(form: str, **changes: Any) -> Checkpoint:
    return dense(form, **changes)[1]


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


def outputs(model: nn.Module, count: int = 5, size: int = 32) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(torch.from_numpy(tiny.images(count, 3, size)))
    return out.double()


def relative(model: nn.Module, exact_model: nn.Module, size: int = 32) -> float:
    exact = outputs(exact_model, size=size)
    return float((outputs(model, size=size) - exact).norm() / exact.norm())
