"""What a change inside a model does to its outputs, to first order: squared gradients, a few backward passes for all.

For a change d of the residual stream behind a branch the outputs change by J d. With random signs v, one for each
number that the model gives, E (v' J d)^2 = |J d|^2 (Hutchinson 1990), and v' J is one backward pass, whatever the
change and however many are tried. No label is asked, and outputs are what the model gives: dense where it gives those.

Legend: B images of a piece, N tokens, C channels, V directions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.hooks import evaluating
from calib.inputs import Inputs, each, pieces
from corp_deploy.families.family import answers, family_of, steps_to_outputs
from corp_deploy.families.steps import Branch, Passage, Walk
from corp_deploy.families.token_merging import Tokens

DIRECTIONS = 3
_LEAST_ENERGY = 1e-30
PIECE_TOKENS = 2048  # as many tokens have their gradients by branch and direction in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Tangent:
    """Of a piece of the inputs: what enters every branch, the stream behind it and behind every named passage [B,N,C],
    the gradients of the outputs by that stream in every direction [V,B,N,C], and the outputs' energy.
    """

    entering: Mapping[str, Tokens]
    behind: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    energy: float

    def energy_of_change(self, name: str, change_BNC: Tensor) -> float:
        """Squared change of the outputs, summed over the piece, when the stream behind a branch changes by so much."""
        moved_VB = torch.einsum("vbnc,bnc->vb", self.gradients[name], change_BNC).double()
        return float(moved_VB.square().mean(dim=0).sum())

    def behind_of(self, branch: Branch, layer: nn.Module) -> Tensor:
        """The stream behind a branch [B,N,C] with this layer in its place."""
        entering = self.entering[branch.name]
        with torch.no_grad():
            behind_BNC, _ = branch.passed(layer, entering.x, entering.sizes)
        return behind_BNC


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=generator.device)
    return (2 * drawn - 1).to(like)


def joined(outputs: Sequence[Tensor]) -> Tensor:
    """Several as one [B,F], each with the same energy, so that all count alike; one as it is."""
    if len(outputs) == 1:
        return outputs[0]
    energies = torch.stack([output.detach().double().square().sum() for output in outputs])
    scales = (energies.mean() / energies.clamp_min(_LEAST_ENERGY)).sqrt()
    return torch.cat([(output * scale.to(output)).flatten(1) for output, scale in zip(outputs, scales, strict=True)], 1)


def _tangent(model: nn.Module, inputs: Inputs, directions: int, generator: torch.Generator) -> Tangent:
    family = family_of(model)
    x_BNC = family.embedded(model, inputs).detach().requires_grad_()
    walk = Walk.of(x_BNC, family.token_weights(model, inputs))
    entering: dict[str, Tokens] = {}
    behind: dict[str, Tensor] = {}
    for step in steps_to_outputs(model):
        before, walk = walk.tokens, walk.behind(step)
        if isinstance(step, Branch):
            entering[step.name] = before._replace(x=before.x.detach())
        if isinstance(step, Branch) or (isinstance(step, Passage) and step.name):
            behind[step.name] = walk.tokens.x
    outputs = joined(answers(model, walk, inputs))
    moved = [
        torch.autograd.grad(outputs, tuple(behind.values()), signs(outputs, generator), retain_graph=True)
        for _ in range(directions)
    ]
    gradients = {name: torch.stack(of_branch) for name, of_branch in zip(behind, zip(*moved, strict=True), strict=True)}
    return Tangent(
        entering=entering,
        behind={name: tensor.detach() for name, tensor in behind.items()},
        gradients=gradients,
        energy=float(outputs.detach().double().square().sum()),
    )


def tangents(model: nn.Module, inputs: Inputs, *, directions: int = DIRECTIONS) -> Iterator[Tangent]:
    """Of the inputs, a few at a time; to be called outside inference mode, for a model that is evaluated."""
    tokens = len(family_of(model).token_kinds(model))
    if not tokens:
        with torch.no_grad():
            tokens = family_of(model).embedded(model, next(pieces(inputs, 1))).shape[1]
    generator = torch.Generator().manual_seed(0)
    for piece in pieces(inputs, max(1, PIECE_TOKENS // tokens)):
        with torch.enable_grad():
            tangent = _tangent(model, each(piece, torch.clone), directions, generator)
        yield tangent


def linear_effects(
    model: nn.Module,
    inputs: Inputs,
    layers: Mapping[str, Sequence[nn.Module]],
    *,
    whole: Mapping[str, nn.Module] | None = None,
    directions: int = DIRECTIONS,
) -> dict[str, list[float]]:
    """Squared relative change of the outputs, to first order, with each of these layers in its branch's place alone.

    Changes are from `whole`, the dense layers by branch, of a model whose own are narrower, else from the model's own.
    Runs the model once forwards and `directions` times backwards, and every layer once.
    """
    if not layers:
        return {}
    effects = {name: [0.0] * len(several) for name, several in layers.items()}
    energy = 0.0
    with torch.inference_mode(False), evaluating(model):
        branches = {step.name: step for step in family_of(model).steps(model) if isinstance(step, Branch)}
        for tangent in tangents(model, inputs, directions=directions):
            energy += tangent.energy
            for name, several in layers.items():
                branch, before_BNC = branches[name], tangent.behind[name]
                if whole is not None:
                    before_BNC = tangent.behind_of(branch, whole[name])
                for place, layer in enumerate(several):
                    change_BNC = tangent.behind_of(branch, layer) - before_BNC
                    effects[name][place] += tangent.energy_of_change(name, change_BNC)
    return {name: [value / energy for value in values] for name, values in effects.items()}
