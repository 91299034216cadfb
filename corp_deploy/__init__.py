"""corp-deploy: ship smaller vision transformers. Importing this package imports neither torch nor timm."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__version__ = "0.1.0"


def load(directory: Path | str) -> "nn.Module":
    """A model directory written by corp-deploy as an ordinary nn.Module in eval mode, on the CPU, in float32.

    Raises ground.errors.BadInput when the directory is missing, foreign or damaged.
    """
    from .store.checkpoint import load_checkpoint

    return load_checkpoint(Path(directory)).model
