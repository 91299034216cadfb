"""Small convolutional networks of timm's: timm's own, whose norms have met images, and the same to be traced.

EfficientNets and MobileNets have names of their own here, as timm's names fix their blocks.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from timm.models import generate_default_cfgs, register_model
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import _cfg, _create_effnet
from timm.models.mobilenetv3 import _create_mnv3
from torch import Tensor, nn

from calib.images import Images
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.sites import Site
from examples.digits.images import load_part
from tests import tiny
from tests.small_models import error as error
from tests.small_models import outputs as outputs

SIZE = 48
DIGITS = Path(__file__).parents[1] / "examples" / "digits"
_FOLDER = TemporaryDirectory()
_RESNET: dict[str, Any] = {"layers": [1, 1, 2, 1], "channels": [16, 16, 24, 32], "stem_width": 8}
_REGNET: dict[str, Any] = {"w0": 16, "wa": 24.0, "wm": 2.0, "depth": 6, "group_size": 8, "stem_width": 16}
BLOCKS: dict[str, tuple[str, ...]] = {
    "small_efficientnet": ("ds_r1_k3_s1_e1_c16_se0.25", "ir_r2_k3_s2_e4_c16_se0.25", "ir_r2_k5_s2_e3_c24_noskip"),
    "small_efficientnetv2": ("cn_r1_k3_s1_c16_skip", "er_r2_k3_s2_e4_c16", "ir_r1_k5_s2_e4_c24_se0.25"),
    "small_condconv": ("ds_r1_k3_s1_e1_c16", "ir_r1_k3_s2_e2_c16_cc2", "ir_r1_k3.5_s2_e4_c24", "ir_r1_k3_s1_e4_c24"),
    "small_mobilenetv3": ("ds_r1_k3_s1_e1_c16_nre", "ir_r2_k3_s2_e4_c16_se0.25", "cn_r1_k1_s1_c48"),
    "small_mobilenetv4": ("uir_r1_a3_k5_s2_e4_c16", "uir_r2_a0_k0_s1_e2_c16", "uir_r1_a3_k0_p3_s2_e2_c24"),
}
default_cfgs = generate_default_cfgs({f"{name}.untrained": _cfg(input_size=(3, SIZE, SIZE)) for name in BLOCKS})


def _sizes(name: str) -> dict[str, Any]:
    return {"block_args": decode_arch_def([[each] for each in BLOCKS[name]]), "stem_size": 16, "num_features": 48}


def _efficientnet(name: str, **kwargs: Any) -> nn.Module:
    return _create_effnet(name, **_sizes(name), **kwargs)


def _mobilenetv3(name: str, **kwargs: Any) -> nn.Module:
    return _create_mnv3(name, **_sizes(name), **kwargs)


@register_model
def small_efficientnet(**kwargs: Any) -> nn.Module:
    return _efficientnet("small_efficientnet", act_layer=nn.SiLU, **kwargs)


@register_model
def small_efficientnetv2(**kwargs: Any) -> nn.Module:
    """With TensorFlow's padding."""
    return _efficientnet("small_efficientnetv2", act_layer=nn.SiLU, pad_type="same", **kwargs)


@register_model
def small_condconv(**kwargs: Any) -> nn.Module:
    """With convolutions of experts and of several kernels."""
    return _efficientnet("small_condconv", **kwargs)


@register_model
def small_mobilenetv3(**kwargs: Any) -> nn.Module:
    return _mobilenetv3("small_mobilenetv3", act_layer=nn.Hardswish, **kwargs)


@register_model
def small_mobilenetv4(**kwargs: Any) -> nn.Module:
    return _mobilenetv3("small_mobilenetv4", layer_scale_init_value=0.5, head_norm=True, **kwargs)


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
    "small_efficientnet": {},
    "small_efficientnetv2": {},
    "small_mobilenetv3": {},
    "small_mobilenetv4": {},
    "resnext50_32x4d": {**_RESNET, "stem_width": 64, "cardinality": 4, "base_width": 32},
}


@cache
def library(name: str, size: int = SIZE) -> nn.Module:
    """timm's own model; statistics of norms are those of images, their weights are spread."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=7, **SMALL.get(name, {}))
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
    """To be traced, of the same weights."""
    kwargs = {"num_classes": 7, "img_size": size, **SMALL.get(name, {})}
    architecture = Architecture(name=name, kwargs=kwargs)
    model = dense_from_architecture(architecture)
    model.load_state_dict(library(name, size).state_dict())
    return Checkpoint(model=model.eval().requires_grad_(False), architecture=architecture, lineage={})


def pixels(count: int, seed: int = 0, size: int = SIZE) -> Tensor:
    return torch.from_numpy(tiny.images(count, seed, size))


def opened(model: nn.Module, count: int, path: Path, seed: int = 0, size: int = SIZE) -> Images:
    return tiny.opened(path / f"images{seed}.npy", pixels(count, seed, size).numpy(), model)


def conv_sites(model: nn.Module) -> list[Site]:
    return [site for site in sites_of(model).every if "stream" not in site.kind]


def streams(model: nn.Module) -> list[Site]:
    return [site for site in sites_of(model).every if "stream" in site.kind]


def method(preset: str, share: float | None, **changes: Any) -> Method:
    return method_from_preset(preset, conv_sparsity=share, align_conv=8, **changes)


@cache
def images_of(name: str, count: int = 64) -> Images:
    """Opened for the model of this name, in files that stay while tests run."""
    folder = Path(_FOLDER.name) / str(count)
    folder.mkdir(exist_ok=True)
    return opened(checkpoint(name).model, count, folder)


@cache
def digits() -> tuple[Checkpoint, Images]:
    """The digits example's trained ResNet, and images to fit to."""
    own = load_dense(str(DIGITS / "resnet"), weights=None, kwargs={})
    return own, tiny.opened(Path(_FOLDER.name) / "digits.npy", load_part("train").images[:192], own.model)


def unseen_digits() -> Tensor:
    return torch.from_numpy(load_part("held-out").images[:256])
