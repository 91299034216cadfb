"""Small models of timm's families without attention, by names of their own where timm's names fix their size."""

from pathlib import Path
from typing import Any

import torch
from timm.layers import GatedMlp, GluMlp
from timm.models import generate_default_cfgs, register_model
from timm.models.mlp_mixer import Affine as Affine
from timm.models.mlp_mixer import MlpMixer, ResBlock, SpatialGatingBlock, _cfg, _create_mixer
from torch import Tensor, nn

from calib.images import Images
from corp_deploy.families import traced_model
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny

NAMES = ("small_mixer", "small_gmixer", "small_resmlp", "small_gmlp")
default_cfgs = generate_default_cfgs({f"{name}.untrained": _cfg(input_size=(3, 32, 32)) for name in NAMES})
SIZES: dict[str, Any] = {"patch_size": 8, "num_blocks": 2, "embed_dim": 32}
CONVNEXT: dict[str, Any] = {
    "depths": (1, 1, 2, 1), "dims": (16, 24, 32, 40), "img_size": 64, "num_classes": 7, "ls_init_value": 0.5
}  # fmt: skip


@register_model
def small_mixer(pretrained: bool = False, **kwargs: Any) -> MlpMixer:
    return _create_mixer("small_mixer", pretrained, **{**SIZES, "mlp_ratio": (1.5, 4.0), **kwargs})


@register_model
def small_gmixer(pretrained: bool = False, **kwargs: Any) -> MlpMixer:
    own = {"mlp_ratio": (2.0, 4.0), "mlp_layer": GluMlp, "act_layer": nn.SiLU}
    return _create_mixer("small_gmixer", pretrained, **{**SIZES, **own, **kwargs})


@register_model
def small_resmlp(pretrained: bool = False, **kwargs: Any) -> MlpMixer:
    own = {"mlp_ratio": 4, "block_layer": ResBlock, "norm_layer": Affine}
    return _create_mixer("small_resmlp", pretrained, **{**SIZES, **own, **kwargs})


@register_model
def small_gmlp(pretrained: bool = False, **kwargs: Any) -> MlpMixer:
    own = {"mlp_ratio": 4, "block_layer": SpatialGatingBlock, "mlp_layer": GatedMlp}
    return _create_mixer("small_gmlp", pretrained, **{**SIZES, **own, **kwargs})


def small(name: str, seed: int = 0, **kwargs: Any) -> Checkpoint:
    """With weights that are large enough to matter: a ConvNeXt of four stages for 64 pixels, else 16 tokens of 32."""
    torch.manual_seed(seed)
    sizes = {"num_classes": 7} if name in NAMES else CONVNEXT
    if name.startswith("convnextv2"):
        sizes = {key: value for key, value in sizes.items() if key != "ls_init_value"}
    architecture = Architecture(name=name, kwargs={**sizes, **kwargs})
    model = dense_from_architecture(architecture)
    tiny.enliven(model, seed)
    return Checkpoint(model=model, architecture=architecture, lineage={})


def size_of(model: nn.Module) -> int:
    return int(traced_model.input_spec(model).shape[-1])


def pixels(model: nn.Module, count: int, seed: int = 0, size: int | None = None) -> Tensor:
    return torch.from_numpy(tiny.images(count, seed, size or size_of(model)))


def opened(model: nn.Module, count: int, path: Path) -> Images:
    return tiny.opened(path / "images.npy", pixels(model, count).numpy(), model)


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    return tiny.ran(model, images).double()


def error(model: nn.Module, dense: nn.Module, images: Tensor) -> float:
    return tiny.relative(tiny.ran(model, images), tiny.ran(dense, images))
