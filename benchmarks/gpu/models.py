"""Dense models with random weights at a trained model's scale, and the same models at reduced widths."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from timm.layers import LayerScale
from torch import nn

from benchmarks.gpu.setting import ALIGN_HEAD, Setting
from benchmarks.quality.timm_sites import first_widths
from corp_deploy.families import traced_model
from corp_deploy.families.counting import count_products, macs
from corp_deploy.families.family import input_ports
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.store.checkpoint import dense_from_architecture
from corp_deploy.traced.models.narrowed_model import at_widths
from perf.runners.module import DTYPES, Precision

LAYER_SCALE = 0.3


def architecture(name: str, setting: Setting) -> Architecture:
    """Return the architecture of the model of this name."""
    return Architecture(name=setting.models[name], kwargs=setting.kwargs)


def dense(name: str, setting: Setting) -> nn.Module:
    """Return the model of this name on the device, in evaluation mode."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = dense_from_architecture(architecture(name, setting))
    enliven(model)
    return model.requires_grad_(False).to(setting.device)


@torch.no_grad()
def enliven(model: nn.Module) -> None:
    """Draw weights at the scale of a trained model's.

    An initial layer scale of 1e-6 would hide every block, so that a wrong output looks right.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, LayerScale):
            module.gamma.fill_(LAYER_SCALE)


def reduced(model: nn.Module, sparsity: float, geometry: HeadGeometry, setting: Setting) -> nn.Module:
    """Return the model without this share of hidden channels and of q/k (if square, also of v), not repaired."""
    method = method_from_preset(
        "best",
        qk_recovery="select",
        mlp_sparsity=sparsity,
        attention_sparsity=sparsity,
        geometry=geometry,
        align_hidden=setting.align_hidden,
        align_head=ALIGN_HEAD,
    )
    return at_widths(model, uniform_widths(model, method))


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A module in its precision, and its facts."""

    module: nn.Module
    facts: dict[str, int]


def form(model: nn.Module, precision: Precision, geometry: HeadGeometry = "ragged") -> Form:
    """Return the module to run; a padded geometry has zeros in its graph."""
    exported, told = traced_model.exportable(model, geometry=geometry), facts(model)
    if geometry == "padded":
        told = told | {"macs": count_products(exported, input_ports(model)).macs}
    return Form(module=exported.to(DTYPES[precision]), facts=told)


def forms(
    model: nn.Module, sparsity: float, geometries: Sequence[HeadGeometry], precision: Precision, setting: Setting
) -> dict[str, Form]:
    """Return the reduced model of each geometry."""
    return {each: form(reduced(model, sparsity, each, setting), precision, each) for each in geometries}


def at_macs_share(model: nn.Module, share: float, align: int) -> tuple[nn.Module, float]:
    """Return a network at the least uniform sparsity, in percent steps, that leaves at most this share of the MACs.

    The second value is the sparsity. Raises ValueError if no sparsity leaves so few MACs.
    """
    dense = macs(model)

    def narrower(percent: int) -> nn.Module:
        sparsity = percent / 100
        method = method_from_preset(
            "none", mlp_sparsity=sparsity, conv_sparsity=sparsity, align_hidden=align, align_conv=align
        )
        return at_widths(model, uniform_widths(model, method))

    percent = bisect_left(range(100), True, key=lambda percent: macs(narrower(percent)) <= share * dense)
    if percent == 100:
        raise ValueError(f"no sparsity of every site leaves {share:g} of the MACs; expected a larger share")
    return narrower(percent), percent / 100


def facts(model: nn.Module) -> dict[str, int]:
    """Return the MACs of an image and the widths of the first block, which all blocks share."""
    return {"macs": macs(model), **first_widths(model)}


@cache
def macs_of(name: str, setting: Setting) -> int:
    """Return the MACs of the dense model for one image, without making its weights."""
    with torch.device("meta"):
        return macs(dense_from_architecture(architecture(name, setting)))


def block_names(module: nn.Module) -> list[str]:
    """Return the names of the blocks of a model of timm, or of its exportable form, in order."""
    return [name for name, _ in module.named_modules() if re.fullmatch(r"blocks\.\d+", name)]
