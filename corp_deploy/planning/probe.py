"""What the outputs of a few images change by when sites are reduced: a budget's one look at the whole model.

Legend: B images, N tokens, C channels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from calib.hooks import evaluating
from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.widths import HeadWidths
from corp_deploy.reduction import pool as site_pool
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import ReducedSite, reduce, reduced_site

Width = int | HeadWidths
Trial = tuple[str, Width]


def _through(step: vit.Branch | nn.Module) -> Callable[[Tensor], Tensor]:
    return partial(step.through, step.layer) if isinstance(step, vit.Branch) else step


def _change(outputs: Tensor, dense: Tensor) -> float:
    """Squared relative change."""
    exact = dense.double()
    return float((outputs.double() - exact).square().sum() / exact.square().sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A model, its moments and some images; `method` say how sites are reduced, `eliminations` are known by site."""

    model: nn.Module
    moments: Moments
    method: Method
    images: Tensor
    eliminations: Mapping[str, Elimination]

    @property
    def _ragged(self) -> Method:
        """Exact at any widths, and only the values count here."""
        return replace(self.method, geometry="ragged")

    def effect(self, widths: Mapping[str, Width]) -> float:
        """Squared relative change of the outputs when these sites have these widths and the others stay."""
        reduced = reduce(self.model, self.moments, self._ragged, widths=widths, eliminations=self.eliminations).model
        with torch.inference_mode():
            return _change(reduced(self.images), self.model(self.images))

    def effects(self, trials: Sequence[Trial]) -> dict[Trial, float]:
        """`effect` of every trial, each one site alone at one width, as elimination leaves it (see Choices.mlp_swaps).

        One walk: what enters a site is the dense model's stream, so only what comes behind it is run again.
        """
        with torch.inference_mode(), evaluating(self.model):
            steps = list(vit.steps(self.model))
            inside = {step.name for step in steps if isinstance(step, vit.Branch)}
            found = {(site, width): self.effect({site: width}) for site, width in trials if site not in inside}
            walked = [trial for trial in trials if trial not in found]
            new = dict(zip(walked, self._reduced(walked), strict=True))
            dense = self.model(self.images)
            x_BNC = vit.embedded(self.model, self.images)
            for place, step in enumerate(steps):
                if isinstance(step, vit.Branch):
                    for trial in walked:
                        if trial[0] == step.name:
                            layer = vit.with_modules(step.layer, step.name, new.pop(trial).modules)
                            outputs = self._finished(step.through(layer, x_BNC), steps[place + 1 :])
                            found[trial] = _change(outputs, dense)
                x_BNC = _through(step)(x_BNC)
        return found

    def _reduced(self, trials: Sequence[Trial]) -> list[ReducedSite]:
        method = replace(self._ragged, mlp_swaps=False)
        parts = {part.name: part for part in vit.sites(self.model).every}

        def at_site(trial: Trial) -> ReducedSite:
            site, width = trial
            known = self.eliminations.get(site)
            return reduced_site(self.model, parts[site], self.moments, method, width, known=known)

        return list(site_pool.each(at_site, trials, vit.device(self.model)))

    def _finished(self, x_BNC: Tensor, steps: Sequence[vit.Branch | nn.Module]) -> Tensor:
        for step in steps:
            x_BNC = _through(step)(x_BNC)
        return vit.finished(self.model, x_BNC)
