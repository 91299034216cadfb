"""The MLPs of a model with merged channels: images go through the dense model to fit them, and again to judge them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.hooks import evaluating
from calib.images import Images
from calib.moments import ChannelMoments, Moments
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.widths import Widths
from ground.errors import BadInput

from .channels import output_energy
from .folded_mlp import See, folded_mlp, judged_mlps
from .method import Method
from .report import HeldOut, SiteReport
from .site import layers_of, mlp_report

BATCH_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownImages:
    """Images, and by their content which were calibrated on and which are held out; the others are left out."""

    images: Images
    fit_ids: Tensor
    held_out_ids: Tensor

    @classmethod
    def of(cls, images: Images, moments: Moments, held_out: Moments | None) -> "ShownImages":
        """Raises BadInput unless some are of each kind that is there."""
        held_out_ids = images.ids[:0] if held_out is None else held_out.image_ids
        rest = images.ids[~torch.isin(images.ids, held_out_ids)]
        fit_ids = moments.image_ids if len(moments.image_ids) else rest
        shown = cls(images=images, fit_ids=fit_ids, held_out_ids=held_out_ids)
        shown._refuse_none("calibration", shown.fit_ids)
        if held_out is not None:
            shown._refuse_none("held-out", held_out_ids)
        return shown

    def _refuse_none(self, kind: str, wanted: Tensor) -> None:
        if not torch.isin(self.images.ids, wanted).any():
            raise BadInput(
                f"--images: none of these {self.images.count} images is a {kind} one by its content, and merged "
                f"channels are fitted to and judged on those; give the {kind} images that the moments were taken on"
            )

    @property
    def fitted(self) -> int:
        """How many of the images are calibration images."""
        return int(torch.isin(self.images.ids, self.fit_ids).sum())

    def batches(self) -> Iterator[tuple[Tensor, bool]]:
        """Images of one kind, and whether they are held out."""
        for batch in self.images.read(BATCH_SIZE):
            for ids, is_held in ((self.fit_ids, False), (self.held_out_ids, True)):
                chosen_B = torch.isin(batch.ids, ids)
                if chosen_B.any():
                    yield batch.inputs[chosen_B], is_held


class _Showing:
    """Each image through the dense model, what enters and leaves its MLPs shown on the way."""

    def __init__(self, model: nn.Module, shown: ShownImages) -> None:
        self.model, self.shown = model, shown
        self.is_held = False

    def _hook(self, see: See) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _, given, out: see(given[0], out, self.is_held)

    def __call__(self, sees: Mapping[str, See]) -> None:
        with ExitStack() as stack, evaluating(self.model), torch.inference_mode():
            for name, see in sees.items():
                stack.callback(self.model.get_submodule(name).register_forward_hook(self._hook(see)).remove)
            for pixels, is_held in self.shown.batches():
                self.is_held = is_held
                self.model(pixels.to(vit.device(self.model)))


def folded_mlps(
    model: nn.Module,
    parts: Mapping[str, vit.ChannelSite],
    widths: Widths,
    moments: Mapping[str, ChannelMoments],
    held_out: Mapping[str, ChannelMoments],
    method: Method,
    shown: ShownImages,
) -> dict[str, tuple[dict[str, nn.Linear], SiteReport]]:
    """New modules and report of each MLP, all by site."""
    every = {}
    for name, part in parts.items():
        width = widths[name]
        assert isinstance(width, int), (name, width)
        every[name] = folded_mlp(part, model.get_submodule(name), moments[name], method, width)
    found = {}
    for name, judged in judged_mlps(every, method, _Showing(model, shown)).items():
        part, layers = every[name].part, layers_of(every[name].part)
        others = None
        if judged.error_held_out is not None:
            others = HeldOut(energy=output_energy(held_out[name], layers), error=judged.error_held_out)
        report = mlp_report(part, method, judged.recovery, output_energy(moments[name], layers), others)
        found[name] = (judged.modules, report)
    return found
