"""What a whole model costs for one image: parameters and multiply-adds, counted, at the shape it takes."""

from torch import nn

from . import timm_vit as vit
from .counting import Counted, count


def counted(model: nn.Module) -> Counted:
    """The multiply-adds of one image by module, and the longest row of products."""
    return count(model, vit.input_spec(model).shape)


def macs(model: nn.Module) -> int:
    """Multiply-adds of one image."""
    return counted(model).macs


def parameters(*modules: nn.Module) -> int:
    """Parameters of these modules together."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
