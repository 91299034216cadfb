"""The MLPs of a model with merged channels: images go through the dense model to fit them, and again to judge them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.hooks import evaluating
from calib.input_set import InputSet
from calib.inputs import Inputs, each, moved, run_model
from calib.moments import ChannelMoments, Moments
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.modules import device
from corp_deploy.families.widths import Widths
from ground.errors import BadInput

from .channel_modules import channel_report, layers_of
from .channels import output_energy
from .folded_channels import FoldedChannels, See, folded_channels, judged_folds
from .kind import LinearReduced
from .method import Method
from .moments import site_moments
from .report import HeldOut

BATCH_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownInputs:
    """Images, and by their content which were calibrated on and which are held out; the others are left out."""

    images: InputSet
    fit_ids: Tensor
    held_out_ids: Tensor

    @classmethod
    def of(cls, images: InputSet, moments: Moments, held_out: Moments | None) -> "ShownInputs":
        """Raises BadInput unless some are of each kind that is there."""
        held_out_ids = images.ids[:0] if held_out is None else held_out.image_ids
        rest = images.ids[~torch.isin(images.ids, held_out_ids)]
        fit_ids = moments.image_ids if len(moments.image_ids) else rest
        shown = cls(images=images, fit_ids=fit_ids, held_out_ids=held_out_ids)
        shown._refuse_none("calibration", shown.fit_ids)
        if held_out is not None:
            shown._refuse_none("held-out", held_out_ids)
        return shown

    def _refuse_none(self, kind: str, ids: Tensor) -> None:
        if not torch.isin(self.images.ids, ids).any():
            raise BadInput(
                f"--images: none of these {self.images.count} images is a {kind} one by its content, and merged "
                f"channels are fitted to and judged on those; give the {kind} images that the moments were taken on"
            )

    @property
    def fitted(self) -> int:
        """How many of the images are calibration images."""
        return int(torch.isin(self.images.ids, self.fit_ids).sum())

    def batches(self) -> Iterator[tuple[Inputs, bool]]:
        """Inputs of one kind, and whether they are held out."""
        for batch in self.images.read(BATCH_SIZE):
            for ids, is_held in ((self.fit_ids, False), (self.held_out_ids, True)):
                chosen_B = torch.isin(batch.ids, ids)
                if chosen_B.any():
                    yield each(batch.inputs, lambda tensor, chosen_B=chosen_B: tensor[chosen_B]), is_held  # type: ignore[misc]


class _Showing:
    """Each input through the dense model; what enters and leaves its MLPs is shown, at the tokens that are there."""

    def __init__(self, model: nn.Module, shown: ShownInputs) -> None:
        self.model, self.shown = model, shown
        self.is_held = False
        self.weights_BN: Tensor | None = None

    def _rows(self, x_BNC: Tensor) -> Tensor:
        return x_BNC if self.weights_BN is None else x_BNC[self.weights_BN > 0.0].unsqueeze(0)

    def _hook(self, see: See) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _, entering, out: see(self._rows(entering[0]), self._rows(out), self.is_held)

    def __call__(self, sees: Mapping[str, See]) -> None:
        family, where = family_of(self.model), device(self.model)
        with ExitStack() as stack, evaluating(self.model), torch.inference_mode():
            for name, see in sees.items():
                stack.callback(self.model.get_submodule(name).register_forward_hook(self._hook(see)).remove)
            for inputs, is_held in self.shown.batches():
                here = moved(inputs, where)
                self.is_held, self.weights_BN = is_held, family.token_weights(self.model, here)
                run_model(self.model, here)


def _folded(
    model: nn.Module,
    sites: Sequence[ChannelSite],
    widths: Widths,
    moments: Moments,
    held_out: Moments | None,
    method: Method,
    shown: ShownInputs,
) -> dict[str, LinearReduced]:
    """Every site's new modules and report, by name."""
    folded: dict[str, FoldedChannels] = {}
    energies: dict[str, tuple[float, float | None]] = {}
    for site in sites:
        width, own = widths[site.name], _channels(site, moments, model)
        assert isinstance(width, int), (site.name, width)
        layers = layers_of(site)
        others = None if held_out is None else output_energy(_channels(site, held_out, model), layers)
        energies[site.name] = output_energy(own, layers), others
        folded[site.name] = folded_channels(site, model.get_submodule(site.name), own, method, width)
    reduced = {}
    for name, judged in judged_folds(folded, method, _Showing(model, shown)).items():
        site, (energy, energy_held_out) = folded[name].site, energies[name]
        elsewhere = None
        if judged.error_held_out is not None and energy_held_out is not None:
            elsewhere = HeldOut(energy=energy_held_out, error=judged.error_held_out)
        report = channel_report(site, method, judged.recovery, energy, elsewhere)
        reduced[name] = LinearReduced(modules={**judged.modules}, last=judged.modules[site.last_name], reports=[report])
    return reduced


def _channels(site: ChannelSite, moments: Moments, model: nn.Module) -> ChannelMoments:
    statistics = site_moments(site, moments, device(model))
    assert isinstance(statistics, ChannelMoments), site.name
    return statistics


def merged_sites(
    model: nn.Module,
    widths: Widths,
    moments: Moments,
    method: Method,
    images: InputSet | None,
    held_out: Moments | None,
) -> tuple[dict[str, LinearReduced], tuple[str, ...]]:
    """The channel sites, by name, where channels are merged, and what is to be said of the images."""
    if not method.merges:
        return {}, ()
    if images is None:
        raise BadInput(
            "merged channels are fitted to and judged by what they give on the calibration images; give them: --images"
        )
    sites = [site for site in sites_of(model).channels if site.name in widths]
    shown = ShownInputs.of(images, moments, held_out)
    merged = _folded(model, sites, widths, moments, held_out, method, shown)
    few = f"merged channels were fitted and judged on {shown.fitted} of the {moments.images} calibration images"
    return merged, (few,) if shown.fitted < moments.images else ()
