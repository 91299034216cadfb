"""What a whole model costs for one input: parameters and multiply-adds, counted, at the shapes it takes."""

from torch import nn

from corp_deploy.traced.models.module import parameters as parameters

from . import traced_model
from .counting import MacCounts, count


def counted(model: nn.Module) -> MacCounts:
    """The multiply-adds of one input by module, and the longest row of products."""
    ports = traced_model.input_spec(model).ports
    return count(traced_model.counted_form(model), ports)


def macs(model: nn.Module) -> int:
    """Multiply-adds of one input."""
    return counted(model).macs
