"""What changes of layers do to the outputs of a traced model, to first order: as curvature.py does of branches.

Legend: B inputs, V directions.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from calib.inputs import Inputs, as_tuple, chunks, tensors_by_name
from corp_deploy.families.traced_model import tracing
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import LINEAR, Called, every_layer

from .curvature import Tangent, joined, tangent_of

_PIECE = 8  # inputs whose gradients by all layers' outputs are in memory at a time
_ALIKE = 1.0
MOST_OUTPUTS = 2048
Change = Mapping[str, Tensor]
"""By the name of a weight or bias by how much it changes, of dense sizes."""


class _Moved(fx.Interpreter):
    """A program with zeros added to what some layers give, by which its outputs can be differentiated."""

    def __init__(self, program: Program, layers: Mapping[fx.Node, Called]) -> None:
        super().__init__(program.graph)
        self.layers, self.entering, self.zeros = layers, dict[Called, Tensor](), dict[Called, Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        layer = self.layers.get(n)
        if layer is None:
            return out
        self.entering[layer] = self.env[n.all_input_nodes[0]].detach()
        self.zeros[layer] = torch.zeros_like(out, requires_grad=True)
        return out + self.zeros[layer]


def _tangent(
    program: Program, inputs: Inputs, layers: Mapping[fx.Node, Called], drawn: torch.Generator
) -> Tangent[Called]:
    moved = _Moved(program, layers)
    with torch.enable_grad():
        given = moved.run(*(each.clone() for each in tensors_by_name(inputs).values()))
        return tangent_of(joined(as_tuple(given)), moved.entering, moved.zeros, drawn)


def _tangents(model: nn.Module, inputs: Inputs, weights: Collection[str]) -> Iterator[Tangent[Called]]:
    """Of pieces of the inputs, what each layer of these weights reads, and gradients by what it gives."""
    program, drawn = tracing(model).running, torch.Generator().manual_seed(0)
    layers = {layer.node: layer for layer in every_layer(program) if layer.weight in weights}
    with torch.inference_mode(False), torch.no_grad():
        for piece in chunks(inputs, _PIECE) if layers else ():
            yield _tangent(program, piece, layers, drawn)


def _moved_by(tangent: Tangent[Called], layer: Called, change: Change) -> Tensor | None:
    """By how much a change of this layer moves the outputs in each direction [V,B]."""
    weight, bias = change.get(layer.weight), change.get(layer.bias)
    if weight is None:
        return None
    x, node = tangent.at[layer], layer.node
    assert callable(node.target), node
    d_BX = node.target(x, weight.to(x), None if bias is None else bias.to(x), *node.args[3:])
    return torch.einsum("vbx,bx->vb", tangent.gradients[layer].flatten(2), d_BX.flatten(1)).double()


def effects_of_changes(model: nn.Module, inputs: Inputs, changes: Sequence[Change]) -> list[float]:
    """Squared relative change of the outputs by each of these alone, by DIRECTIONS backward passes for all."""
    effects, energy = [0.0] * len(changes), 0.0
    for tangent in _tangents(model, inputs, {name for change in changes for name in change}):
        energy += tangent.energy
        for place, change in enumerate(changes):
            every = (_moved_by(tangent, layer, change) for layer in tangent.at)
            moved = [each for each in every if each is not None]
            effects[place] += float(sum(moved).square().mean(dim=0).sum()) if moved else 0.0  # type: ignore[union-attr]
    return [effect / energy for effect in effects] if any(effects) else effects


def output_metrics(model: nn.Module, inputs: Inputs, weights: Collection[str]) -> dict[str, Tensor]:
    """By the name of a layer's weight the M [O,O], float64 and positive definite, of which d' M d is what a change d of
    an output of the layer does to the model's outputs, on average over its places: E[g g'] of their gradients g
    (the Gauss-Newton matrix), with its mean diagonal added: what large cuts do is not first order, and half of a metric
    that has all outputs alike loses less then (benchmarks/real/tried.py). Layers that no output hangs on, and those of
    more than MOST_OUTPUTS outputs, have none.
    """
    sums, program = dict[str, Tensor](), tracing(model).running
    few = {name for name in weights if len(program.tensor(name)) <= MOST_OUTPUTS}
    for tangent in _tangents(model, inputs, few):
        for layer, gradient in tangent.gradients.items():
            last = gradient if layer.node.target is LINEAR else gradient.movedim(2, -1)
            rows_XO = last.flatten(0, -2).float()
            sums[layer.weight] = sums.get(layer.weight, 0.0) + (rows_XO.T @ rows_XO).double() / len(rows_XO)
    scales = {name: float(sum_OO.diagonal().mean()) for name, sum_OO in sums.items()}
    return {
        name: sum_OO + _ALIKE * scales[name] * torch.eye(len(sum_OO), dtype=sum_OO.dtype, device=sum_OO.device)
        for name, sum_OO in sums.items()
        if 0.0 < scales[name] < math.inf
    }
