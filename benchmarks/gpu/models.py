"""Dense models with random but lively weights, and the same models at reduced widths, made on the device."""

from bisect import bisect_left
from functools import cache

import timm
import torch
from torch import nn

from benchmarks.gpu.setting import ALIGN_HEAD, Setting
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.head_attention import Geometry
from corp_deploy.families.model_cost import macs
from corp_deploy.families.modules import replaced
from corp_deploy.families.steps import Branch
from corp_deploy.families.traced_narrowing import at_widths
from corp_deploy.families.widths import aligned_width
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from perf.runners.module import DTYPES, Precision

LAYER_SCALE = 0.3


def dense(name: str, setting: Setting, precision: Precision = "fp32") -> nn.Module:
    """The model of this name in evaluation mode."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        model: nn.Module = timm.create_model(setting.models[name], pretrained=False, **setting.kwargs)
    enliven(model)
    return model.eval().requires_grad_(False).to(setting.device, DTYPES[precision])


@torch.no_grad()
def enliven(model: nn.Module) -> None:
    """Weights at the scale of a trained model's: as initialised, a layer scale of 1e-6 would hide every block's work,
    so that a wrong output looked right.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
    for step in vit.steps(model):
        if isinstance(step, Branch) and step.scale_C is not None:
            step.scale_C.fill_(LAYER_SCALE)


def reduced(model: nn.Module, sparsity: float, geometry: Geometry, setting: Setting) -> nn.Module:
    """The model with that share of hidden channels and of q/k (and, square, v) taken away; new random weights there."""
    share, modules = 1.0 - sparsity, dict[str, nn.Module]()
    found = vit.sites(model)
    for mlp in found.channels:
        hidden = aligned_width(mlp.width, share, setting.align_hidden)
        modules |= mlp.empty(hidden, output_bias=mlp.last.bias is not None)
    for part in found.heads:
        width = aligned_width(part.qk, share, ALIGN_HEAD)
        v = width if geometry == "square" else part.v
        modules[part.name] = part.empty(qk=width, v=v, geometry="square" if width == v else geometry)
    return replaced(model, modules).eval().requires_grad_(False)


def at_macs_share(model: nn.Module, share: float, align: int) -> tuple[nn.Module, float]:
    """A convolutional network with the same share of every site's channels taken away, the least in percent that leaves
    at most this share of the MACs; and that sparsity. Raises ValueError where none does.
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
    """MACs of an image and the widths of the first block; all blocks have the same here."""
    found = vit.sites(model)
    first = found.heads[0]
    return {"macs": macs(model), "hidden": found.channels[0].width, "qk": first.qk, "v": first.v}


@cache
def macs_of(name: str, setting: Setting) -> int:
    """Of the dense model for one image, without making its weights."""
    with torch.device("meta"):
        return macs(timm.create_model(setting.models[name], pretrained=False, **setting.kwargs))


def block_names(model: nn.Module) -> list[str]:
    """The blocks that hold the sites, in order."""
    return list(dict.fromkeys(part.name.rpartition(".")[0] for part in vit.sites(model).channels))
