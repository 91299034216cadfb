"""Small models of attention in windows: two stages of two blocks, whose windows divide the map, or need padding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from corp_deploy.families.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny

SMALL: dict[str, Any] = {
    "img_size": 56, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "mlp_ratio": 2.0, "num_classes": 7
}  # fmt: skip
V1, V2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"
FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "windows": (V1, SMALL),  # 2 x 2 windows of 7 x 7, then one
    "padding": (V1, SMALL | {"img_size": (40, 64), "window_size": (4, 7)}),  # maps of 10 x 16, then of 5 x 8
    "cosines": (V2, SMALL | {"img_size": (40, 64), "window_size": 8}),  # likewise
}
NORMS_IN_FRONT = ("windows", "padding")
"""Forms whose norms stand in front of their layers."""


def checkpoint(form: str, **changes: Any) -> Checkpoint:
    """Random weights that are large enough to matter."""
    torch.manual_seed(0)
    name, kwargs = FORMS[form]
    architecture = Architecture(name=name, kwargs=kwargs | changes)
    model = dense_from_architecture(architecture)
    tiny.enliven(model, 0)
    return Checkpoint(model=model, architecture=architecture, lineage={})


def pixels(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Smooth random images of the size that the model takes."""
    from corp_deploy.families.family import family_of

    _, height, width = family_of(model).input_spec(model).shape
    square = torch.from_numpy(tiny.images(count, seed, max(height, width)))
    return square[:, :, :height, :width].contiguous()
