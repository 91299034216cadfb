"""Small models whose attention adds to scores by where tokens stand, or mixes them over the heads: Swin, whose windows
divide the map or need padding, BEiT, VisionTransformerRelPos, CaiT.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import timm
import torch
from torch import Tensor, nn

from calib.images import Images
from calib.moments import Moments
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import image_spec
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny
from tests.vit_forms import SMALL

SWIN: dict[str, Any] = {
    "img_size": 56, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "mlp_ratio": 2.0, "num_classes": 7
}  # fmt: skip
SCALED = SMALL | {"init_values": 0.3}
V1, V2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"
FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "windows": (V1, SWIN),  # 2 x 2 windows of 7 x 7, then one
    "padding": (V1, SWIN | {"img_size": (40, 64), "window_size": (4, 7)}),  # maps of 10 x 16, then of 5 x 8
    "cosines": (V2, SWIN | {"img_size": (40, 64), "window_size": 8}),  # likewise
    "tables": ("beit_base_patch16_224", SCALED),
    "tables, one of them for all blocks": ("beitv2_base_patch16_224", SCALED | {"use_shared_rel_pos_bias": True}),
    "networks": ("vit_relpos_base_patch16_clsgap_224", SCALED | {"rel_pos_type": "mlp_swin"}),
    "a network for all blocks, norms behind": ("vit_relpos_small_patch16_rpn_224", SMALL | {"shared_rel_pos": True}),
    "talking heads": ("cait_xxs24_224", SCALED),
}


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


def pixels(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Smooth random images of the size that the model takes."""
    _, height, width = image_spec(model).shape
    square = torch.from_numpy(tiny.images(count, seed, max(height, width)))
    return square[:, :, :height, :width].contiguous()


def opened(model: nn.Module, count: int) -> Images:
    return tiny.opened(Path(mkdtemp()) / "images.npy", pixels(model, count).numpy(), model)


@cache
def moments(form: str) -> Moments:
    own = checkpoint(form)
    return calibrate(own, opened(own.model, 64), batch_size=8, statistics=Statistics(attention_system=True))
