"""What stands beside an attention's layers and knows its heads apart, for some of them alone.

Legend: H heads kept.
"""

import copy

from torch import Tensor, nn

from .cosine import ScaledUnitLength
from .modules import linear, replaced
from .position_bias import ContinuousBias, FixedBias, TableBias


def _outputs_of(layer: nn.Linear, kept_H: Tensor) -> nn.Linear:
    """A layer that gives these outputs alone."""
    fewer = linear(layer.in_features, len(kept_H), bias=layer.bias is not None).to(layer.weight)
    fewer.weight.data.copy_(layer.weight[kept_H])
    if layer.bias is not None:
        fewer.bias.data.copy_(layer.bias[kept_H])
    return fewer


def _continuous(bias: ContinuousBias, kept_H: Tensor) -> ContinuousBias:
    """Its network ends in a layer with an output a head."""
    last = [name for name, layer in bias.cpb_mlp.named_modules() if isinstance(layer, nn.Linear)][-1]
    layer = bias.cpb_mlp.get_submodule(last)
    assert isinstance(layer, nn.Linear), last
    fewer = copy.deepcopy(bias)
    fewer.cpb_mlp = replaced(bias.cpb_mlp, {last: _outputs_of(layer, kept_H)})
    return fewer


def bias_of_heads(bias: nn.Module | None, kept_H: Tensor) -> nn.Module | None:
    """What is added to the scores of these heads."""
    if bias is None:
        return None
    if isinstance(bias, TableBias):
        return TableBias(bias.table[:, kept_H], bias.index.view(bias.tokens, -1))
    if isinstance(bias, FixedBias):
        return FixedBias(bias.bias_1HNN[:, kept_H])
    assert isinstance(bias, ContinuousBias), type(bias)
    return _continuous(bias, kept_H)


def norm_of_heads(norm: nn.Module, kept_H: Tensor) -> nn.Module:
    """What is done to the queries or keys of these heads."""
    if isinstance(norm, ScaledUnitLength):
        return ScaledUnitLength(norm.logit_scale[kept_H])
    return copy.deepcopy(norm)
