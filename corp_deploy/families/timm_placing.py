"""Which of timm's models are built with blocks whose attention knows its positions."""

from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.eva import Eva
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

from . import timm_cait_blocks, timm_eva_blocks, timm_relative_blocks


def with_placed_blocks(model: nn.Module) -> nn.Module:
    """A model just built, with such blocks where its attention would be told; itself where there is nothing to tell."""
    if isinstance(model, Eva):
        return timm_eva_blocks.placed(model)
    if isinstance(model, Cait):
        return timm_cait_blocks.placed(model)
    return timm_relative_blocks.placed(model) if isinstance(model, Beit | VisionTransformerRelPos) else model
