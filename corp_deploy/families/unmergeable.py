"""Models whose tokens are never merged."""

from torch import nn

from ground.errors import BadInput

from .merging import Merging
from .modules import replaced


def copy_without_merging(model: nn.Module, merging: Merging | None, refusal: str) -> nn.Module:
    """A copy in eval mode, where nothing is to be merged. Raises BadInput, with the reason, for a merging."""
    if merging is not None:
        raise BadInput(f"token merging: {refusal}; leave --merge-tokens away")
    return replaced(model, {}).eval()
