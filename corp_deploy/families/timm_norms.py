"""The norms of timm's blocks that stand behind their layers."""

from torch import nn


def have_layer_norms(block: nn.Module) -> bool:
    """Whether both norms of a block of one attention and one MLP are layer norms, as what is fitted in front of them
    must be.
    """
    return all(isinstance(block.get_submodule(name), nn.LayerNorm) for name in ("norm1", "norm2"))


def layer_norm(norm: nn.Module) -> nn.LayerNorm:
    """The norm as what it is."""
    assert isinstance(norm, nn.LayerNorm), norm
    return norm
