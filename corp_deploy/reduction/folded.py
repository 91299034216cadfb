"""The sites of a model with merged channels or heads: images go through the dense model to fit and to judge them."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from calib.hooks import evaluating
from calib.input_set import InputSet
from calib.inputs import moved, run_model
from calib.moments import ChannelMoments, HeadMoments, Moments
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.modules import device
from corp_deploy.families.traced_module import TracedModule
from corp_deploy.families.widths import HeadWidths, Width, Widths
from ground.effort import Stopwatch, turn
from ground.errors import BadInput

from .channel_modules import channel_report, layers_of
from .channels import output_energy
from .folded_channels import FoldedModules, folded_channels, given_by
from .folded_heads import folded_heads
from .heads import output_energy as output_energy_of_heads
from .judged_folds import PADDED, JudgedFold, See, judged_folds
from .kind import LinearReduced, Reduced
from .method import Method
from .moments import site_moments
from .report import HeldOut, SiteReport
from .shown_inputs import ShownInputs
from .traced_folds import traced_folds
from .whole_heads import heads_report


class _Showing:
    """Each input through the dense model; what enters and leaves its layers is shown to the merged ones, at the tokens
    that are there, of those in `whole` at all of them.
    """

    def __init__(
        self, model: nn.Module, shown: ShownInputs, every: Mapping[str, FoldedModules], whole: Collection[str]
    ) -> None:
        self.model, self.shown, self.whole = model, shown, whole
        self.given = {name: given_by(each) for name, each in every.items()}
        self.is_held = False
        self.weights_BN: Tensor | None = None

    def _rows(self, x_BNC: Tensor) -> Tensor:
        return x_BNC if self.weights_BN is None else x_BNC[self.weights_BN > 0.0].unsqueeze(0)

    def _hook(self, name: str, see: See) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        given, rows = self.given[name], (lambda x: x) if name in self.whole else self._rows
        return lambda _, entering, out: see(*given(rows(entering[0]), rows(out)), self.is_held)

    def __call__(self, sees: Mapping[str, See]) -> None:
        family, where = family_of(self.model), device(self.model)
        with ExitStack() as stack, evaluating(self.model), torch.inference_mode():
            for name, see in sees.items():
                stack.callback(self.model.get_submodule(name).register_forward_hook(self._hook(name, see)).remove)
            for inputs, is_held in self.shown.batches():
                here = moved(inputs, where)
                self.is_held, self.weights_BN = is_held, family.token_weights(self.model, here)
                if self.weights_BN is not None and self.whole:
                    raise BadInput(PADDED.format(next(iter(self.whole))))
                run_model(self.model, here)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged:
    """A site's merged layer, with the energy of the dense one's outputs, and on held-out images."""

    folded: FoldedModules
    energy: float
    energy_held_out: float | None
    report: Callable[[ChannelRecovery, float, HeldOut | None], SiteReport]

    def reduced(self, judged: JudgedFold) -> LinearReduced:
        elsewhere = None
        if judged.error_held_out is not None and self.energy_held_out is not None:
            elsewhere = HeldOut(energy=self.energy_held_out, error=judged.error_held_out)
        report = self.report(judged.recovery, self.energy, elsewhere)
        modules = self.folded.modules(judged.recovery.weight_OK, judged.recovery.bias_O)
        return LinearReduced(modules={**modules}, last=self.folded.last(modules), reports=[report])


def _of_channels(
    model: nn.Module, site: ChannelSite, width: Width, moments: Moments, held_out: Moments | None, method: Method
) -> _Merged:
    assert isinstance(width, int), (site.name, width)

    def statistics(taken: Moments) -> ChannelMoments:
        own = site_moments(site, taken, device(model))
        assert isinstance(own, ChannelMoments), site.name
        return own

    layers, own = layers_of(site), statistics(moments)
    return _Merged(
        folded=folded_channels(site, model.get_submodule(site.name), own, method, width),
        energy=output_energy(own, layers),
        energy_held_out=None if held_out is None else output_energy(statistics(held_out), layers),
        report=partial(channel_report, site, method),
    )


def _of_heads(
    model: nn.Module, site: HeadSite, count: int, moments: Moments, held_out: Moments | None, method: Method
) -> _Merged:
    def statistics(taken: Moments) -> HeadMoments:
        own = site_moments(site, taken, device(model))
        assert isinstance(own, HeadMoments), site.name
        return own

    weight_OC, own = site.last.weight.detach().double(), statistics(moments)
    return _Merged(
        folded=folded_heads(site, model.get_submodule(site.name), own, method, count),
        energy=output_energy_of_heads(own, weight_OC),
        energy_held_out=None if held_out is None else output_energy_of_heads(statistics(held_out), weight_OC),
        report=partial(heads_report, site.name, site.heads, method, count),
    )


def _clustered(
    model: nn.Module, widths: Widths, moments: Moments, method: Method, held_out: Moments | None
) -> tuple[dict[str, _Merged], set[str]]:
    """The merged layers by site, and which of these are attentions."""
    sites, merged, attentions = sites_of(model), dict[str, _Merged](), set[str]()
    for site in sites.channels if method.merges else ():
        if site.name in widths:
            merged[site.name] = _of_channels(model, site, widths[site.name], moments, held_out, method)
    for head_site in sites.heads if method.folds_heads else ():
        width = widths.get(head_site.name)
        if isinstance(width, HeadWidths) and width.heads is not None:
            merged[head_site.name] = _of_heads(model, head_site, width.heads, moments, held_out, method)
            attentions.add(head_site.name)
    return merged, attentions


def merged_sites(
    model: nn.Module,
    widths: Widths,
    moments: Moments,
    method: Method,
    images: InputSet | None,
    held_out: Moments | None,
    watch: Stopwatch | None = None,
) -> tuple[dict[str, Reduced], tuple[str, ...]]:
    """The sites, by name, where channels or heads are merged, and what is to be said of the images."""
    if not method.merges and not method.folds_heads:
        return {}, ()
    if images is None:
        raise BadInput(
            "merged channels and heads are fitted to and judged by what they give on the calibration images; give "
            "them: --images"
        )
    shown = ShownInputs.of(images, moments, held_out)
    few = f"what was merged was fitted and judged on {shown.fitted} of the {moments.images} calibration images"
    notes = (few,) if shown.fitted < moments.images else ()
    if isinstance(model, TracedModule):
        return traced_folds(model, widths, moments, method, shown, held_out, watch), notes
    with turn(watch, "select"):
        merged, attentions = _clustered(model, widths, moments, method, held_out)
    folded = {name: each.folded for name, each in merged.items()}
    judged = judged_folds(folded, method, _Showing(model, shown, folded, attentions))
    reduced: dict[str, Reduced] = {name: merged[name].reduced(each) for name, each in judged.items()}
    return reduced, notes
