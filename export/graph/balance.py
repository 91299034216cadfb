"""Outliers moved from what norms give into the weights of the layers that read it, without changing the model.

SmoothQuant (Xiao et al. 2023, arXiv 2211.10438, equations 3 and 4): X W = (X / s)(s W), with 1/s folded into the norm's
weight and bias. A channel of large activations takes the whole range of a tensor from the others; balanced, activations
and weights share the burden.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto
from torch import Tensor, nn

from .weights import read_matrices

STRENGTH = 0.5
_NORMS = ("LayerNormalization", "RMSNormalization")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """A norm and the linear layers that alone read what it gives, by their paths; `value`: what that is called in the
    graph.
    """

    norm: str
    readers: tuple[str, ...]
    value: str


def balanceable(proto: ModelProto, model: nn.Module) -> tuple[Balanced, ...]:
    """Every norm over channels, with a weight of its own, that linear layers alone read."""
    modules = dict(model.named_modules())
    matrices = {node.name: index for node, index, _ in read_matrices(proto)}
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in proto.graph.node:
        for name in node.input:
            readers[name].append(node)
    return tuple(_balanceable(proto, modules, matrices, readers))


def _balanceable(
    proto: ModelProto,
    modules: Mapping[str, nn.Module],
    matrices: Mapping[str, int],
    readers: Mapping[str, list[NodeProto]],
) -> Iterator[Balanced]:
    # Who holds each parameter: one that several modules share can't change for one of them.
    weight_uses = Counter(id(weight) for each in modules.values() for weight in each.parameters(recurse=False))
    output_names = {value.name for value in proto.graph.output}
    for node in proto.graph.node:
        if node.op_type not in _NORMS or node.output[0] in output_names:
            continue
        norm, own = node.name.rpartition("/")[0], readers[node.output[0]]
        paths = tuple(each.name.rpartition("/")[0] for each in own)
        linear = [isinstance(modules.get(path), nn.Linear) for path in paths]
        if not own or not all(linear) or any(matrices.get(each.name) != 1 for each in own):
            continue
        weights = [getattr(modules.get(path), "weight", None) for path in (norm, *paths)]
        if all(weight_uses[id(weight)] == 1 for weight in weights):
            yield Balanced(norm=norm, readers=paths, value=node.output[0])


@torch.no_grad()
def balance_(model: nn.Module, places: tuple[Balanced, ...], largest: Mapping[str, NDArray[np.float32]]) -> None:
    """In place. `largest`: by value the largest |x| of each channel [C]."""
    for place in places:
        norm: Any = model.get_submodule(place.norm)
        linears = [model.get_submodule(path) for path in place.readers]
        weights = [linear.weight for linear in linears if isinstance(linear, nn.Linear)]
        scale_C = strengths(torch.from_numpy(largest[place.value]), [weight.detach() for weight in weights])
        norm.weight.copy_(norm.weight.double() / scale_C)
        if getattr(norm, "bias", None) is not None:
            norm.bias.copy_(norm.bias.double() / scale_C)
        for weight in weights:
            weight.copy_(weight.double() * scale_C)


def strengths(largest_C: Tensor, weights: list[Tensor]) -> Tensor:
    """SmoothQuant's s [C], float64: max |x_j|^a / max |w_j|^(1-a), with mean logarithm 0; 1 where either is zero."""
    weight_C = torch.stack([weight.double().abs().amax(dim=0) for weight in weights]).amax(dim=0)
    activation_C = largest_C.double()
    alive_C = (weight_C > 0) & (activation_C > 0)
    log_C = STRENGTH * activation_C.clamp_min(1e-30).log() - (1 - STRENGTH) * weight_C.clamp_min(1e-30).log()
    if not bool(alive_C.any()):
        return torch.ones_like(log_C)
    return torch.where(alive_C, (log_C - log_C[alive_C].mean()).exp(), torch.ones_like(log_C))
