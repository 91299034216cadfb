"""First-order effects of changes inside a model on its outputs, and output metrics of layers, by a few backward passes.

A change d of the residual stream behind a segment, or of a layer's output, changes the model's outputs by J d. With a
random sign v for each number in the outputs, E (v' J d)^2 = |J d|^2 (Hutchinson 1990), and v' J is one backward pass
that serves every change. No label is needed.

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
from corp_deploy.families.traced_model import outputs_of_walk, steps_to_outputs, tracing
from corp_deploy.traced.models.steps import SegmentStep, StreamState
from corp_deploy.traced.programs.program import Program, batch_axis_of
from corp_deploy.traced.programs.readers import LINEAR, CalledLayer, every_layer

DIRECTIONS = 3
_LEAST_ENERGY = 1e-30
Place = TypeVar("Place")
PIECE_TOKENS = 2048  # tokens whose gradients by segment and direction are in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGradients(Generic[Place]):
    """Gradients of the outputs for a piece of the inputs, by place: the name of a segment, or a called layer.

    `at` holds the stream behind each segment [B,N,C], or each layer's input. `gradients` holds, for V random sign
    vectors v, the derivatives of <v, outputs> [V,B,...] by that stream or by the layer's output. `energy` is the sum of
    the squared outputs.
    """

    at: Mapping[Place, Tensor]
    gradients: Mapping[Place, Tensor]
    energy: float

    def energy_of_change(self, place: Place, change_BNC: Tensor) -> float:
        """Return the squared change of the outputs, summed over the images, by a change of the stream at a place."""
        moved_VB = torch.einsum("vbnc,bnc->vb", self.gradients[place], change_BNC).double()
        return float(moved_VB.square().mean(dim=0).sum())


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=generator.device)
    return (2 * drawn - 1).to(like)


def join_outputs(outputs: Sequence[Tensor]) -> Tensor:
    """Concatenate several outputs to [B,F], flattened and scaled to equal energy; return a single one unchanged."""
    if len(outputs) == 1:
        return outputs[0]
    energies = torch.stack([output.detach().double().square().sum() for output in outputs])
    scales = (energies.mean() / energies.clamp_min(_LEAST_ENERGY)).sqrt()
    return torch.cat(
        [(output * scale.to(output)).reshape(len(output), -1) for output, scale in zip(outputs, scales, strict=True)], 1
    )


def gradients_of(
    outputs: Tensor, at: Mapping[Place, Tensor], changing: Mapping[Place, Tensor], generator: torch.Generator
) -> OutputGradients[Place]:
    """Differentiate the outputs' products with DIRECTIONS random sign vectors by the tensors in `changing`."""
    by_direction = [
        torch.autograd.grad(
            outputs,
            tuple(changing.values()),
            random_signs(outputs, generator),
            retain_graph=True,
            materialize_grads=True,  # zeros for a tensor that no output depends on
        )
        for _ in range(DIRECTIONS)
    ]
    gradients = map(torch.stack, zip(*by_direction, strict=True))
    return OutputGradients(
        at={place: tensor.detach() for place, tensor in at.items()},
        gradients=dict(zip(changing, gradients, strict=True)),
        energy=float(outputs.detach().double().square().sum()),
    )


def output_gradients(model: nn.Module, inputs: Inputs) -> Iterator[OutputGradients[str]]:
    """Yield the outputs' gradients by the stream behind every segment, for a few inputs at a time.

    Call it outside inference mode, with a model in evaluation mode.
    """
    tokens = len(traced_model.token_kinds(model))
    if not tokens:
        with torch.no_grad():
            tokens = traced_model.first_stream(model, next(chunks(inputs, 1))).shape[1]
    generator = torch.Generator().manual_seed(0)
    for piece in chunks(inputs, max(1, PIECE_TOKENS // tokens)):
        copied, behind = map_tensors(piece, torch.clone), dict[str, Tensor]()
        with torch.enable_grad():
            x_BNC = traced_model.first_stream(model, copied).detach().requires_grad_()
            walk = StreamState.of(x_BNC, traced_model.token_weights(model, copied))
            for step in steps_to_outputs(model):
                walk = walk.behind(step)
                if isinstance(step, SegmentStep):
                    behind[step.name] = walk.tokens.x
            gradients = gradients_of(join_outputs(outputs_of_walk(model, walk, copied)), behind, behind, generator)
        yield gradients


_PIECE = 8  # inputs whose gradients by all layers' outputs are in memory at a time
_ALIKE = 1.0
MOST_OUTPUTS = 2048
Change = Mapping[str, Tensor]
"""Differences of weights and biases from the dense ones by name, in the dense shapes."""


class _ShiftInterpreter(fx.Interpreter):
    """An interpreter that keeps some layers' inputs and adds zeros to their outputs, to differentiate by."""

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


def _layer_gradients(
    model: nn.Module, inputs: Inputs, weights: Collection[str]
) -> Iterator[OutputGradients[CalledLayer]]:
    """Yield, for a few inputs at a time, the input of each layer with these weights and the gradients by its output."""
    program, drawn = tracing(model).followed, torch.Generator().manual_seed(0)
    layers = {layer.node: layer for layer in every_layer(program) if layer.weight in weights}
    with torch.inference_mode(False), torch.no_grad():
        for piece in chunks(inputs, _PIECE) if layers else ():
            moved = _ShiftInterpreter(program, layers)
            with torch.enable_grad():
                given = moved.run(*(each.clone() for each in tensors_by_name(piece).values()))
                gradients = gradients_of(join_outputs(as_tuple(given)), moved.entering, moved.zeros, drawn)
            yield gradients


def _moved_by(gradients: OutputGradients[CalledLayer], layer: CalledLayer, change: Change) -> Tensor | None:
    """Return v' J d for a change of this layer and each random direction v, or None if the layer doesn't change.

    The result is by image [V,B], or summed over images [V,1] if the layer's output has no batch axis.
    """
    weight, bias = change.get(layer.weight), change.get(layer.bias)
    if weight is None:
        return None
    x, node = gradients.at[layer], layer.node
    assert callable(node.target), node
    d_X: Tensor = node.target(x, weight.to(x), None if bias is None else bias.to(x), *node.args[3:])
    by_element = gradients.gradients[layer] * d_X
    batch = batch_axis_of(node)
    if batch is None:
        return by_element.flatten(1).double().sum(dim=1, keepdim=True)
    return torch.stack([batch.in_front(each).flatten(1).double().sum(dim=1) for each in by_element])


def _energy_moved(by_layer: Sequence[Tensor]) -> float:
    """Return the squared change of the outputs by all layers together, from v' J d of each layer [V,B] or [V,1]."""
    if len({each.shape for each in by_layer}) > 1:
        by_layer = [each.sum(dim=1, keepdim=True) for each in by_layer]
    return float(torch.stack(list(by_layer)).sum(dim=0).square().mean(dim=0).sum())


def effects_of_changes(model: nn.Module, inputs: Inputs, changes: Sequence[Change]) -> list[float]:
    """Return the squared relative change of the outputs by each change alone, to first order."""
    effects, energy = [0.0] * len(changes), 0.0
    for gradients in _layer_gradients(model, inputs, {name for change in changes for name in change}):
        energy += gradients.energy
        for place, change in enumerate(changes):
            every = (_moved_by(gradients, layer, change) for layer in gradients.at)
            moved = [each for each in every if each is not None]
            effects[place] += _energy_moved(moved) if moved else 0.0
    return [effect / energy for effect in effects] if any(effects) else effects


def compute_output_metrics(model: nn.Module, inputs: Inputs, weights: Collection[str]) -> dict[str, Tensor]:
    """Return the output metric M [O,O] of each layer, by the name of its weight; float64, positive definite.

    d' M d is the squared change of the model's outputs by a change d of the layer's output, on average over its
    positions: E[g g'] of the gradients g (the Gauss-Newton matrix), with its mean diagonal added to the diagonal. The
    addition helps where many channels are removed, as the first order is inexact there (docs/measured/tried.md). Layers
    that no output depends on, and those of more than MOST_OUTPUTS outputs, have no metric.
    """
    sums, program = dict[str, Tensor](), tracing(model).followed
    few = {name for name in weights if len(program.tensor(name)) <= MOST_OUTPUTS}
    for gradients in _layer_gradients(model, inputs, few):
        for layer, gradient in gradients.gradients.items():
            last = gradient if layer.node.target is LINEAR else gradient.movedim(2, -1)
            rows_XO = last.flatten(0, -2).float()
            sums[layer.weight] = sums.get(layer.weight, 0.0) + (rows_XO.T @ rows_XO).double() / len(rows_XO)
    scales = {name: float(sum_OO.diagonal().mean()) for name, sum_OO in sums.items()}
    return {
        name: sum_OO + _ALIKE * scales[name] * torch.eye(len(sum_OO), dtype=sum_OO.dtype, device=sum_OO.device)
        for name, sum_OO in sums.items()
        if 0.0 < scales[name] < math.inf
    }
