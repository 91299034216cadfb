"""What a change inside a model does to its outputs, to first order: squared gradients, a few backward passes for all.

For a change d of the residual stream behind a segment the outputs change by J d. With random signs v, one for each
number that the model gives, E (v' J d)^2 = |J d|^2 (Hutchinson 1990), and v' J is one backward pass, whatever the
change and however many are tried; of changes of layers likewise, by what they give. No label is asked, and outputs are
what the model gives: dense where it gives those.

Legend: B images of a piece, N tokens, C channels, V directions.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx, nn

from calib.inputs import Inputs, as_tuple, chunks, map_tensors, tensors_by_name
from corp_deploy.families import traced_model
from corp_deploy.families.family import answers, steps_to_outputs
from corp_deploy.families.traced_model import tracing
from corp_deploy.traced.models.steps import SegmentStep, StreamState
from corp_deploy.traced.programs.program import Program, batch_axis_of
from corp_deploy.traced.programs.readers import LINEAR, CalledLayer, every_layer

DIRECTIONS = 3
_LEAST_ENERGY = 1e-30
Place = TypeVar("Place")
PIECE_TOKENS = 2048  # as many tokens have their gradients by segment and direction in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Tangent(Generic[Place]):
    """Of a piece of the inputs: what stands at some places, such as the stream behind every segment [B,N,C]; the
    gradients of the outputs by what changes there in every direction [V,B,...]; and the outputs' energy.
    """

    at: Mapping[Place, Tensor]
    gradients: Mapping[Place, Tensor]
    energy: float

    def energy_of_change(self, place: Place, change_BNC: Tensor) -> float:
        """Squared change of the outputs, summed over the piece, when the stream there changes by so much."""
        moved_VB = torch.einsum("vbnc,bnc->vb", self.gradients[place], change_BNC).double()
        return float(moved_VB.square().mean(dim=0).sum())


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=generator.device)
    return (2 * drawn - 1).to(like)


def joined(outputs: Sequence[Tensor]) -> Tensor:
    """Several as one [B,F], each with the same energy, so that all count alike; one as it is."""
    if len(outputs) == 1:
        return outputs[0]
    energies = torch.stack([output.detach().double().square().sum() for output in outputs])
    scales = (energies.mean() / energies.clamp_min(_LEAST_ENERGY)).sqrt()
    return torch.cat(
        [(output * scale.to(output)).reshape(len(output), -1) for output, scale in zip(outputs, scales, strict=True)], 1
    )


def tangent_of(
    outputs: Tensor, at: Mapping[Place, Tensor], changing: Mapping[Place, Tensor], generator: torch.Generator
) -> Tangent[Place]:
    """Of outputs that were computed with gradients of what changes."""
    by_direction = [
        torch.autograd.grad(
            outputs,
            tuple(changing.values()),
            signs(outputs, generator),
            retain_graph=True,
            materialize_grads=True,  # what no output hangs on moves none
        )
        for _ in range(DIRECTIONS)
    ]
    gradients = map(torch.stack, zip(*by_direction, strict=True))
    return Tangent(
        at={place: tensor.detach() for place, tensor in at.items()},
        gradients=dict(zip(changing, gradients, strict=True)),
        energy=float(outputs.detach().double().square().sum()),
    )


def tangents(model: nn.Module, inputs: Inputs) -> Iterator[Tangent[str]]:
    """Of the inputs, a few at a time; to be called outside inference mode, for a model that is evaluated."""
    tokens = len(traced_model.token_kinds(model))
    if not tokens:
        with torch.no_grad():
            tokens = traced_model.embedded(model, next(chunks(inputs, 1))).shape[1]
    generator = torch.Generator().manual_seed(0)
    for piece in chunks(inputs, max(1, PIECE_TOKENS // tokens)):
        copied, behind = map_tensors(piece, torch.clone), dict[str, Tensor]()
        with torch.enable_grad():
            x_BNC = traced_model.embedded(model, copied).detach().requires_grad_()
            walk = StreamState.of(x_BNC, traced_model.token_weights(model, copied))
            for step in steps_to_outputs(model):
                walk = walk.behind(step)
                if isinstance(step, SegmentStep):
                    behind[step.name] = walk.tokens.x
            tangent = tangent_of(joined(answers(model, walk, copied)), behind, behind, generator)
        yield tangent


_PIECE = 8  # inputs whose gradients by all layers' outputs are in memory at a time
_ALIKE = 1.0
MOST_OUTPUTS = 2048
Change = Mapping[str, Tensor]
"""By the name of a weight or bias by how much it changes, of dense sizes."""


class _Moved(fx.Interpreter):
    """A program with zeros added to what some layers give, by which its outputs can be differentiated."""

    def __init__(self, program: Program, layers: Mapping[fx.Node, CalledLayer]) -> None:
        super().__init__(program.graph)
        self.layers, self.entering, self.zeros = layers, dict[CalledLayer, Tensor](), dict[CalledLayer, Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        layer = self.layers.get(n)
        if layer is None:
            return out
        self.entering[layer] = self.env[n.all_input_nodes[0]].detach()
        self.zeros[layer] = torch.zeros_like(out, requires_grad=True)
        return out + self.zeros[layer]


def _tangents(model: nn.Module, inputs: Inputs, weights: Collection[str]) -> Iterator[Tangent[CalledLayer]]:
    """Of pieces of the inputs, what each layer of these weights reads, and gradients by what it gives."""
    program, drawn = tracing(model).running, torch.Generator().manual_seed(0)
    layers = {layer.node: layer for layer in every_layer(program) if layer.weight in weights}
    with torch.inference_mode(False), torch.no_grad():
        for piece in chunks(inputs, _PIECE) if layers else ():
            moved = _Moved(program, layers)
            with torch.enable_grad():
                given = moved.run(*(each.clone() for each in tensors_by_name(piece).values()))
                tangent = tangent_of(joined(as_tuple(given)), moved.entering, moved.zeros, drawn)
            yield tangent


def _moved_by(tangent: Tangent[CalledLayer], layer: CalledLayer, change: Change) -> Tensor | None:
    """Return by how much a change of this layer moves the outputs in each direction: of each image [V,B], or of all
    together [V,1] if the program doesn't tell the images apart there.
    """
    weight, bias = change.get(layer.weight), change.get(layer.bias)
    if weight is None:
        return None
    x, node = tangent.at[layer], layer.node
    assert callable(node.target), node
    d_X: Tensor = node.target(x, weight.to(x), None if bias is None else bias.to(x), *node.args[3:])
    by_element = tangent.gradients[layer] * d_X
    batch = batch_axis_of(node)
    if batch is None:
        return by_element.flatten(1).double().sum(dim=1, keepdim=True)
    return torch.stack([batch.in_front(each).flatten(1).double().sum(dim=1) for each in by_element])


def _energy_moved(by_layer: Sequence[Tensor]) -> float:
    """Return the mean over the directions of what layers [V,B] or [V,1] together move the outputs by, squared."""
    if len({each.shape for each in by_layer}) > 1:
        by_layer = [each.sum(dim=1, keepdim=True) for each in by_layer]
    return float(torch.stack(list(by_layer)).sum(dim=0).square().mean(dim=0).sum())


def effects_of_changes(model: nn.Module, inputs: Inputs, changes: Sequence[Change]) -> list[float]:
    """Squared relative change of the outputs by each of these alone, by DIRECTIONS backward passes for all."""
    effects, energy = [0.0] * len(changes), 0.0
    for tangent in _tangents(model, inputs, {name for change in changes for name in change}):
        energy += tangent.energy
        for place, change in enumerate(changes):
            every = (_moved_by(tangent, layer, change) for layer in tangent.at)
            moved = [each for each in every if each is not None]
            effects[place] += _energy_moved(moved) if moved else 0.0
    return [effect / energy for effect in effects] if any(effects) else effects


def output_metrics(model: nn.Module, inputs: Inputs, weights: Collection[str]) -> dict[str, Tensor]:
    """By the name of a layer's weight the M [O,O], float64 and positive definite, of which d' M d is what a change d of
    an output of the layer does to the model's outputs, on average over its places: E[g g'] of their gradients g
    (the Gauss-Newton matrix), with its mean diagonal added: what large cuts do is not first order, and half of a metric
    that has all outputs alike loses less then (docs/measured/tried.md). Layers that no output hangs on, and those of
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
