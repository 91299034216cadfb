"""What the outputs of a few images change by when sites are reduced: a budget's one look at the whole model.

A change of a block reaches what is behind it alone: what no change reaches runs once for all, so that a trial runs half
of a model where they are everywhere. Legend: B images, N tokens, C channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from corp_deploy.spec.widths import Width, Widths
from corp_deploy.traced.models.module import device_of
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.sizes import changes_in_place

from .curvature import effects_of_changes

_PIECE = 8  # inputs whose activations in front of all changes are in memory at a time
Change = Mapping[str, Tensor]
"""New tensors by the names of those that they stand for."""


class _Kept(fx.Interpreter):
    """Runs a program and keeps what some nodes give."""

    def __init__(self, program: Program, keeps: set[fx.Node]) -> None:
        super().__init__(program.graph)
        self.keeps, self.kept = keeps, dict[fx.Node, Any]()

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n in self.keeps:
            self.kept[n] = out
        return out


def _behind(program: Program, change: Change) -> set[fx.Node]:
    """The nodes that depend on these, with the weights that they read; all that compute where one changes what it is
    given.
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
    program: Program, inputs: Inputs, changes: Sequence[Change], dense: Sequence[Tensor]
) -> list[float]:
    """Squared relative change of the outputs, the mean of several, by each of these alone; `dense`: those without."""
    if not changes:
        return []
    behind = [_behind(program, change) for change in changes]
    read = {each for nodes in behind for node in nodes for each in node.all_input_nodes if each not in nodes}
    moved = torch.zeros(len(changes), len(dense), dtype=torch.float64)
    start = 0
    for piece in chunks(inputs, _PIECE):
        given = tuple(tensors_by_name(piece).values())
        dense_of_piece = [each[start : start + len(given[0])].double() for each in dense]
        whole = _Kept(program, {node for node in read if node.op != "get_attr"})
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


FEW = 8  # inputs
Trial = tuple[str, Width]


@dataclass(frozen=True, kw_only=True)  # without slots, so that the outputs can be kept
class Probe:
    """A model, its moments and some inputs; `method` says how sites are reduced, `eliminations` are known by site.
    `others`: inputs that a closed loop is tried on, where one is asked for.
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
        """Exact at any widths, and only the values count here; nothing is rescaled, which takes images."""
        return replace(self.method, geometry="ragged", rescales=False)

    def effect(self, widths: Widths, *, merging: Merging | None = None) -> float:
        """Squared relative change of the outputs with these widths, the other sites whole, and tokens merged so."""
        return self.effect_of(self.narrowed(widths, merging=merging))

    def effect_of(self, reduced: nn.Module) -> float:
        """Squared relative change of the outputs with this model in place of the dense one."""
        with torch.inference_mode():
            pairs = zip(as_tuple(run_model(reduced, self.inputs)), map(Tensor.double, self.outputs), strict=True)
            moved = [float((each.double() - exact).square().sum() / exact.square().sum()) for each, exact in pairs]
            return sum(moved) / len(moved)

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """The model's own of these inputs, made once."""
        with torch.inference_mode():
            return as_tuple(run_model(self.model, self.inputs))

    def effects(self, trials: Sequence[Trial]) -> dict[Trial, float]:
        """`effect` of trials, each one site alone at one width, as elimination leaves it (see Method.mlp_swaps)."""
        with torch.inference_mode():
            return self._exact_effects(self._reduced(trials))

    @property
    def few(self) -> "Probe":
        """Looks at about FEW of the inputs, evenly."""
        return replace(self, inputs=map_tensors(self.inputs, lambda tensor: tensor[:: max(1, len(tensor) // FEW)]))

    def carried_out(self, widths: Widths, *, merging: Merging | None = None) -> nn.Module:
        """`narrowed` as the reduction will be: where that is a closed loop, in one over the others."""
        if self.loop is None or self.others is None:
            return self.narrowed(widths, merging=merging)
        with torch.inference_mode(False), torch.no_grad():
            model = self.model if merging is None else traced_model.with_merging(self.model, merging)
            return reduce_traced(
                model, self.others, self._ragged, widths=widths, loop=self.loop, metrics=self.moments.metrics
            ).model

    def narrowed(self, widths: Widths, *, merging: Merging | None = None) -> nn.Module:
        """The model with these widths that merges tokens so, as `effect` looks at it; gradients may go through it."""
        with torch.inference_mode(False), torch.no_grad():
            reduced = reduce(
                self.model, self.moments, self._ragged, widths=widths, eliminations=self.eliminations
            ).model
            return reduced if merging is None else traced_model.with_merging(reduced, merging)

    def linear_effects(self, trials: Sequence[Trial]) -> dict[Trial, float]:
        """`effects` to first order where layers that read a site change alone, at the cost of a few passes however many
        trials there are (see curvature.py); exact, on fewer inputs, where rows that write it are mixed too.
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
        exact = self.few._exact_effects({trial: each for trial, each in new.items() if trial not in changes})
        return {**dict(zip(changes, linear, strict=True)), **exact}

    def _exact_effects(self, new: Mapping[Trial, TracedReduced]) -> dict[Trial, float]:
        """By the dense program with the weights that change, where no group goes by itself alone."""
        running, changes, effects = tracing(self.model).running, dict[Trial, Change](), dict[Trial, float]()
        for trial, each in new.items():
            if not each.selected:
                tensors = changed_tensors({trial[0]: each})
                changes[trial] = {name: tensor.to(running.tensor(name).dtype) for name, tensor in tensors.items()}
            else:
                effects[trial] = self.effect({trial[0]: trial[1]})
        with torch.inference_mode(), evaluating(self.model):
            moved = effects_of_new_tensors(running, self.inputs, list(changes.values()), self.outputs)
        return effects | dict(zip(changes, moved, strict=True))

    def _reduced(self, trials: Sequence[Trial]) -> dict[Trial, TracedReduced]:
        method, where = replace(self._ragged, mlp_swaps=False), device_of(self.model)
        sites = sites_of(self.model).by_name

        def at_site(trial: Trial) -> TracedReduced:
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
