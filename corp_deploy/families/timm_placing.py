"""Which of timm's models are built with blocks whose attention knows its positions."""

from timm.models.eva import Eva
from torch import nn

from . import timm_eva_blocks


def with_placed_blocks(model: nn.Module) -> nn.Module:
    """A model just built, with such blocks where its attention would be told; itself where there is nothing to tell."""
    return timm_eva_blocks.placed(model) if isinstance(model, Eva) else model
