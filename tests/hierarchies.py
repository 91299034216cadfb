"""Small models of timm's hierarchies: stages that change layout, size and channels, with windows, grids and units."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import timm
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny

_SMALL: Mapping[str, Any] = {"img_size": 64, "num_classes": 7}
_WINDOWS: Mapping[str, Any] = {
    **_SMALL,
    "stem_width": [16, 16],
    "transformer_window_size": [4, 4],
    "transformer_grid_size": [4, 4],
    "transformer_dim_head": 16,
}
_COATNET: Mapping[str, Any] = {
    **_SMALL,
    "embed_dim": [16, 32, 48],
    "depths": [1, 2, 1],
    "block_type": ["C", "T", "T"],
    "stem_width": [16, 16],
    "transformer_dim_head": 16,
}
FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    # Mask units of 8 x 8 tokens, of 4 x 4 behind the first stage, then all tokens see each other.
    "hiera": ("hiera_tiny_224", {**_SMALL, "embed_dim": 16, "num_heads": 1, "stages": [1, 2, 1, 1]}),
    "hiera_abswin": (
        "hiera_small_abswin_256",
        {**_SMALL, "img_size": [64, 96], "embed_dim": 16, "num_heads": 1, "stages": [1, 1, 1, 1], "init_values": 0.5},
    ),
    "maxvit_tf": (
        "maxvit_tiny_tf_224",
        {**_WINDOWS, "embed_dim": [32, 48], "depths": [1, 1], "block_type": ["M", "M"], "head_hidden_size": 32},
    ),
    "maxxvit": (
        "maxxvit_rmlp_nano_rw_256",
        {
            **_WINDOWS,
            "embed_dim": [32, 64],
            "depths": [1, 1],
            "block_type": ["M", "M"],
            "conv_init_values": 0.5,
            "transformer_init_values": 0.5,
        },
    ),
    "maxvit_pm": (
        "maxvit_tiny_pm_256",
        {**_WINDOWS, "embed_dim": [32, 64], "depths": [1, 1], "block_type": ["PM", "PM"]},
    ),
    "coatnet": ("coatnet_0_rw_224", {**_COATNET}),
    "coatnext": ("coatnext_nano_rw_224", {**_COATNET, "conv_init_values": 0.5, "transformer_init_values": 0.5}),
    # Windows of 4 of maps of 8, of 3 of maps of 4, which needs padding, and of 2 of a map of 2.
    "tiny_vit": (
        "tiny_vit_5m_224",
        {
            **_SMALL,
            "embed_dims": [16, 32, 48, 64],
            "depths": [1, 1, 2, 1],
            "num_heads": [1, 2, 3, 4],
            "window_sizes": [4, 4, 3, 2],
        },
    ),
    # Whose attention is for 7 x 7 tokens alone.
    "efficientformer": (
        "efficientformer_l1",
        {
            "embed_dims": [16, 24, 32, 160],
            "depths": [1, 1, 1, 2],
            "num_vit": 1,
            "mlp_ratios": 2,
            "num_classes": 7,
            "layer_scale_init_value": 0.5,
        },
    ),
    "efficientformer_v2": (
        "efficientformerv2_s0",
        {
            **_SMALL,
            "embed_dims": [16, 24, 32, 48],
            "depths": [1, 1, 2, 2],
            "num_vit": 1,
            "mlp_ratios": 3,
            "layer_scale_init_value": 0.5,
        },
    ),
}


@torch.no_grad()
def enliven_(model: nn.Module) -> None:
    """Weights by what enters them, and running statistics that are not those of the start."""
    tiny.enliven(model, 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.mul_((parameter.shape[-1] / parameter[0].numel()) ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_var"):
            buffer.mul_(0.5 + torch.rand(buffer.shape, generator=generator))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def theirs(form: str, **changes: Any) -> nn.Module:
    """timm's own."""
    name, kwargs = FORMS[form]
    arguments = {key: _tuples(value) for key, value in {**kwargs, **changes}.items()}
    if form == "tiny_vit":
        del arguments["img_size"]
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, **arguments).eval()
    enliven_(model)
    return model


def checkpoint(form: str, **changes: Any) -> Checkpoint:
    """To be traced, with timm's weights, a model of its own each time."""
    made = _checkpoint(form, json.dumps(changes))
    return replace(made, model=copy.deepcopy(made.model))


@cache
def _checkpoint(form: str, written: str) -> Checkpoint:
    changes = json.loads(written)
    name, kwargs = FORMS[form]
    architecture = Architecture(name=name, kwargs={**kwargs, **changes})
    model = dense_from_architecture(architecture)
    model.load_state_dict(theirs(form, **changes).state_dict(), assign=True)
    return Checkpoint(model=model.requires_grad_(False), architecture=architecture, lineage={})


def pixels(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Of the model's size, with something of their own at every pixel."""
    _, height, width = traced_model.input_spec(model).shape
    images = torch.from_numpy(tiny.images(count, seed, max(height, width)))[:, :, :height, :width]
    fine = torch.randn(images.shape, generator=torch.Generator().manual_seed(100 + seed))
    return 2.0 * images + 0.5 * fine
