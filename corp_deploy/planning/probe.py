"""What the outputs of a few images change by when sites are reduced: a budget's one look at the whole model.

Legend: B images, N tokens, C channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from calib.inputs import Inputs, InputSet, as_tuple, map_tensors, run_model
from calib.moments import Moments
from calib.sites import evaluating
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import tracing
from corp_deploy.families.widths import Width, Widths
from corp_deploy.reduction import pool
from corp_deploy.reduction.kind import Order
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import reduce, reduced_site
from corp_deploy.reduction.traced_change import TracedReduced, tensors_of
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.module import device

from .program_effects import effects_of_changes
from .program_trials import Change, effects_of_new_tensors

FEW = 8  # inputs
Trial = tuple[str, Width]


def _change(outputs: Sequence[Tensor], dense: Sequence[Tensor]) -> float:
    """Squared relative change, the mean of several outputs."""
    return sum(map(_relative_change, outputs, dense)) / len(dense)


def _relative_change(output: Tensor, dense: Tensor) -> float:
    exact = dense.double()
    return float((output.double() - exact).square().sum() / exact.square().sum())


@dataclass(frozen=True, kw_only=True)  # without slots, so that the outputs can be kept
class Probe:
    """A model, its moments and some inputs; `method` says how sites are reduced, `eliminations` are known by site.

    `others`: inputs that a closed loop is tried on, where one is asked for.
    """

    model: nn.Module
    moments: Moments
    method: Method
    inputs: Inputs
    eliminations: Mapping[str, Order]
    others: InputSet | None = None
    loop: Loop | None = None

    @property
    def _ragged(self) -> Method:
        """Exact at any widths, and only the values count here; nothing is rescaled, which takes images."""
        return replace(self.method, geometry="ragged", rescales=False)

    def effect(self, widths: Widths, *, merging: Merging | None = None) -> float:
        """Squared relative change of the outputs when these sites have these widths and the others stay, and tokens are
        merged so.
        """
        return self.effect_of(self.narrowed(widths, merging=merging))

    def effect_of(self, reduced: nn.Module) -> float:
        """Squared relative change of the outputs with this model in place of the dense one."""
        with torch.inference_mode():
            return _change(as_tuple(run_model(reduced, self.inputs)), self.outputs)

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
        trials there are (see program_effects.py); exact, on fewer inputs, where rows that write it are mixed too.
        """
        program, new = tracing(self.model).program, self._reduced(trials)
        tensors = {
            trial: tensors_of({trial[0]: each}) for trial, each in new.items() if not (each.mapped or each.selected)
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
                tensors = tensors_of({trial[0]: each})
                changes[trial] = {name: tensor.to(running.tensor(name).dtype) for name, tensor in tensors.items()}
            else:
                effects[trial] = self.effect({trial[0]: trial[1]})
        with torch.inference_mode(), evaluating(self.model):
            moved = effects_of_new_tensors(running, self.inputs, list(changes.values()), self.outputs)
        return effects | dict(zip(changes, moved, strict=True))

    def _reduced(self, trials: Sequence[Trial]) -> dict[Trial, TracedReduced]:
        method = replace(self._ragged, mlp_swaps=False)
        sites = sites_of(self.model).by_name

        def at_site(trial: Trial) -> TracedReduced:
            name, width = trial
            cached = self.eliminations.get(name)
            return reduced_site(self.model, sites[name], self.moments, method, width, cached=cached)

        return dict(zip(trials, pool.each(at_site, trials, device(self.model)), strict=True))
