"""The probe of a budget: changes of a model's outputs, on a few images, when sites are reduced.

A changed weight affects only the nodes behind it. The values of other nodes are computed once for all trials, so that a
trial runs half of the model on average.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, fx, nn

from calib.inputs import Inputs, InputSet, as_tuple, chunks, map_tensors, run_model, tensors_by_name
from calib.moments import Moments
from calib.sites import evaluating
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import tracing
from corp_deploy.reduction import pool
from corp_deploy.reduction.change import TracedReduced, changed_tensors
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import reduce, reduce_site
from corp_deploy.spec.merging import Merging
from corp_deploy.spec.widths import Widths
from corp_deploy.traced.models.module import device_of
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.sizes import changes_in_place

from .curvature import effects_of_changes

_PIECE = 8  # inputs whose activations in front of all changes are in memory at a time
NewTensors = Mapping[str, Tensor]
"""Replacements of a program's tensors by name."""


class _KeepingInterpreter(fx.Interpreter):
    """An interpreter that keeps the outputs of the nodes `keeps` in `kept`."""

    def __init__(self, program: Program, keeps: set[fx.Node]) -> None:
        super().__init__(program.graph)
        self.keeps, self.kept = keeps, dict[fx.Node, Any]()

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n in self.keeps:
            self.kept[n] = out
        return out


def _nodes_behind(program: Program, change: NewTensors) -> set[fx.Node]:
    """Return the nodes to run again after a change: those that depend on it, with the other weights that they read.

    Every node runs again if the program has an operation that changes its input in place.
    """
    every = any(map(changes_in_place, program.nodes))
    changed = {node for node in program.nodes if node.op == "get_attr" and node.target in change}
    reached = set(changed)
    for node in program.nodes:
        computes = node.op not in ("placeholder", "get_attr")
        if computes and (every or not reached.isdisjoint(node.all_input_nodes)):
            reached.add(node)
    weights = {each for node in reached for each in node.all_input_nodes if each.op == "get_attr"}
    return (reached | weights) - changed


def effects_of_new_tensors(
    program: Program, inputs: Inputs, changes: Sequence[NewTensors], dense: Sequence[Tensor]
) -> list[float]:
    """Return the squared relative change of the outputs by each change alone, averaged over the outputs.

    `dense` are the outputs without a change.
    """
    if not changes:
        return []
    behind = [_nodes_behind(program, change) for change in changes]
    read = {each for nodes in behind for node in nodes for each in node.all_input_nodes if each not in nodes}
    moved = torch.zeros(len(changes), len(dense), dtype=torch.float64)
    start = 0
    for piece in chunks(inputs, _PIECE):
        given = tuple(tensors_by_name(piece).values())
        dense_of_piece = [each[start : start + len(given[0])].double() for each in dense]
        whole = _KeepingInterpreter(program, {node for node in read if node.op != "get_attr"})
        whole.run(*given)
        for place, (nodes, change) in enumerate(zip(behind, changes, strict=True)):
            known = {
                each: change.get(str(each.target), whole.kept.get(each)) for each in program.nodes if each not in nodes
            }
            outputs = as_tuple(fx.Interpreter(program.graph).run(initial_env=known, enable_io_processing=False))
            for number, (output, exact) in enumerate(zip(outputs, dense_of_piece, strict=True)):
                moved[place, number] += float((output.double() - exact).square().sum())
        start += len(given[0])
    energies = torch.tensor([float(each.double().square().sum()) for each in dense], dtype=torch.float64)
    shares: list[float] = (moved / energies).mean(1).tolist()
    return shares


FEW = 8  # inputs on which effects are computed exactly
SiteTrial = tuple[str, int]
_LEAST = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEffects:
    """The squared relative difference of a reduced model's outputs, of all inputs together and of the median input."""

    mean: float
    median: float

    @property
    def both(self) -> float:
        """The geometric mean of both, by which a few hard inputs don't decide alone."""
        return math.sqrt(self.mean * self.median)


def _square_sums(x: Tensor) -> Tensor:
    """Return the sum of squares of each input's elements [B]."""
    return x.square().reshape(len(x), -1).sum(1)


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached property
class Probe:
    """A model, its moments and the inputs on which its reductions are measured.

    `eliminations` are the orders of removal by site. If the reduction asks for a closed loop, `loop` has its settings
    and `others` are the inputs that it is fitted to.
    """

    model: nn.Module
    moments: Moments
    method: Method
    inputs: Inputs
    eliminations: Mapping[str, Elimination]
    others: InputSet | None = None
    loop: Loop | None = None

    @property
    def _ragged(self) -> Method:
        """The method with heads as pruned, neither padded nor square, and without rescaling, which needs images."""
        return replace(self.method, geometry="ragged", rescales=False)

    def effect_of(self, reduced: nn.Module) -> float:
        """Return the squared relative difference of a reduced model's outputs from the dense model's."""
        return self.effects_over_inputs(reduced).mean

    def effects_over_inputs(self, reduced: nn.Module) -> "InputEffects":
        """Return the squared relative difference of all inputs together and of the median input, mean over outputs."""
        with torch.inference_mode():
            pairs = zip(as_tuple(run_model(reduced, self.inputs)), map(Tensor.double, self.outputs), strict=True)
            sums = [(_square_sums(each.double() - exact), _square_sums(exact)) for each, exact in pairs]
        return InputEffects(
            mean=fmean(float(moved_B.sum() / energy_B.sum()) for moved_B, energy_B in sums),
            median=fmean(float((moved_B / energy_B.clamp_min(_LEAST)).median()) for moved_B, energy_B in sums),
        )

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """The dense model's outputs for the inputs."""
        with torch.inference_mode():
            return as_tuple(run_model(self.model, self.inputs))

    def effects(self, trials: Sequence[SiteTrial]) -> dict[SiteTrial, float]:
        """Return the `effect_of` each trial, one site alone at one width, without swaps (see Method.mlp_swaps)."""
        with torch.inference_mode():
            return self._exact_effects(self._reduced(trials))

    @property
    def on_few_inputs(self) -> "Probe":
        """The same probe with about FEW of the inputs, evenly spaced."""
        return replace(self, inputs=map_tensors(self.inputs, lambda tensor: tensor[:: max(1, len(tensor) // FEW)]))

    def carried_out(self, widths: Widths, *, merging: Merging | None = None) -> nn.Module:
        """Return the model with these widths and this merging, fitted by the closed loop if the probe has one."""
        if self.loop is None or self.others is None:
            return self.narrowed(widths, merging=merging)
        with torch.inference_mode(False), torch.no_grad():
            model = self.model if merging is None else traced_model.with_merging(self.model, merging)
            return reduce_traced(
                model, self.others, self._ragged, widths=widths, loop=self.loop, metrics=self.moments.metrics
            ).model

    def narrowed(self, widths: Widths, *, merging: Merging | None = None) -> nn.Module:
        """Return the model with these widths and this merging, fitted to the moments; it can be differentiated."""
        with torch.inference_mode(False), torch.no_grad():
            reduced = reduce(
                self.model, self.moments, self._ragged, widths=widths, eliminations=self.eliminations
            ).model
            return reduced if merging is None else traced_model.with_merging(reduced, merging)

    def linear_effects(self, trials: Sequence[SiteTrial]) -> dict[SiteTrial, float]:
        """Estimate the effect of each trial, to first order if the trial changes only layers that read the site.

        The estimates take a few passes for any number of trials (see curvature.py). Trials that also change layers that
        write the site, or only remove groups, are measured exactly, on fewer inputs.
        """
        program, new = tracing(self.model).program, self._reduced(trials)
        tensors = {
            trial: changed_tensors({trial[0]: each})
            for trial, each in new.items()
            if not (each.mapped or each.selected)
        }
        changes = {
            trial: {name: each - program.tensor(name).double() for name, each in own.items()}
            for trial, own in tensors.items()
        }
        linear = effects_of_changes(self.model, self.inputs, list(changes.values()))
        exact = self.on_few_inputs._exact_effects({trial: each for trial, each in new.items() if trial not in changes})
        return {**dict(zip(changes, linear, strict=True)), **exact}

    def _exact_effects(self, new: Mapping[SiteTrial, TracedReduced]) -> dict[SiteTrial, float]:
        """Measure trials by new weights in the dense program, or in a narrowed model if they only select groups."""
        running, changes, effects = (
            tracing(self.model).followed,
            dict[SiteTrial, NewTensors](),
            dict[SiteTrial, float](),
        )
        for trial, each in new.items():
            if not each.selected:
                tensors = changed_tensors({trial[0]: each})
                changes[trial] = {name: tensor.to(running.tensor(name).dtype) for name, tensor in tensors.items()}
            else:
                effects[trial] = self.effect_of(self.narrowed(dict([trial])))
        with torch.inference_mode(), evaluating(self.model):
            moved = effects_of_new_tensors(running, self.inputs, list(changes.values()), self.outputs)
        return effects | dict(zip(changes, moved, strict=True))

    def _reduced(self, trials: Sequence[SiteTrial]) -> dict[SiteTrial, TracedReduced]:
        method, where = replace(self._ragged, mlp_swaps=False), device_of(self.model)
        sites = sites_of(self.model).by_name

        def at_site(trial: SiteTrial) -> TracedReduced:
            return reduce_site(
                sites[trial[0]],
                widths=dict([trial]),
                moments=self.moments,
                method=method,
                where=where,
                chosen=self.eliminations,
            )

        with pool.mapping(len(trials), where) as each:
            return dict(zip(trials, each(at_site, trials), strict=True))
