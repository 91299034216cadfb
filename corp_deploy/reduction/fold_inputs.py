"""Runs of a traced model with merged channels or heads, for all sites at once.

The dense program runs from cut to cut. Between the layers that write merged units and those that read them it also runs
with the mean rows, so that the readers can be fitted to the merged inputs.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from calib.inputs import Inputs, InputSet, map_tensors, tensors_by_name, to_device
from calib.moments import Moments
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import token_weights, tracing
from corp_deploy.spec.widths import Widths
from corp_deploy.traced.finding.cuts import find_cuts, required_nodes, side_inputs
from corp_deploy.traced.models.module import Tracing, device_of
from ground.effort import Stopwatch, measure_effort
from ground.errors import BadInput

from .change import TracedReduced
from .folded_site import TracedFold, fold_site, merges_units
from .method import Method
from .reader_stats import stats_of_readers
from .stream_walk import run_on_batch

BATCH_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownInputs:
    """Images with the content ids of the calibration set and the held-out set; images in neither are ignored."""

    images: InputSet
    fit_ids: Tensor
    held_out_ids: Tensor

    @classmethod
    def of(cls, images: InputSet, moments: Moments, held_out: Moments | None) -> "ShownInputs":
        """Sort images by the moments that they belong to; raise BadInput if any moments have none."""
        held_out_ids = images.ids[:0] if held_out is None else held_out.image_ids
        fit_ids = moments.image_ids if len(moments.image_ids) else images.ids[~torch.isin(images.ids, held_out_ids)]
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
        """The number of calibration images among these."""
        return int(torch.isin(self.images.ids, self.fit_ids).sum())

    def batches(self) -> Iterator[tuple[Inputs, bool]]:
        """Yield batches of either set alone, and whether they are held out."""
        for batch in self.images.read(BATCH_SIZE):
            for ids, is_held in ((self.fit_ids, False), (self.held_out_ids, True)):
                chosen_B = torch.isin(batch.ids, ids)
                if chosen_B.any():
                    yield map_tensors(batch.inputs, lambda tensor, chosen_B=chosen_B: tensor[chosen_B]), is_held  # type: ignore[misc]


_Stretch = tuple[list[fx.Node], fx.Node | None, list[TracedFold]]
"""The nodes to run from one cut to the next, that cut, and the folded sites between."""


def _stretches(own: Tracing, every: Iterable[TracedFold]) -> Iterator[_Stretch]:
    """Yield the stretches of the program between its cuts, up to the last folded site."""
    order, left = {node: place for place, node in enumerate(own.program.nodes)}, list(every)
    for before, after in pairwise([None, *(cut.node for cut in find_cuts(own.analysis)), None]):
        end = len(order) if after is None else order[after]
        folds = [each for each in left if max(order[node] for node in each.units.region.ends) <= end]
        left = [each for each in left if each not in folds]
        ends = [node for each in folds for node in each.units.region.around]
        ends += [after] if after is not None and left else []
        yield required_nodes(own.program, before, ends), after, folds
        if not left:
            return


@torch.inference_mode()
def _sum_images(model: nn.Module, shown: ShownInputs, own: Tracing, every: Collection[TracedFold]) -> None:
    """Run each image through the dense program, and from its values add to the sums of every folded site's readers."""
    stretches = tuple(_stretches(own, every))
    for batch, is_held in shown.batches():
        here = to_device(batch, device_of(model))
        weights_BN = token_weights(model, here)
        entering = dict(zip(own.program.inputs, tensors_by_name(here).values(), strict=True))
        beside = {node: entering[node] for node in side_inputs(own.program)}
        for nodes, after, folds in stretches:
            values = run_on_batch(own.program, nodes, entering)
            for fold in folds:
                fold.show(values, weights_BN, is_held_out=is_held)
            entering = beside | {node: values[node] for node in [after] if node in values}


def merge_sites(
    model: nn.Module,
    widths: Widths,
    moments: Moments,
    method: Method,
    images: InputSet | None,
    held_out: Moments | None,
    watch: Stopwatch | None = None,
) -> tuple[dict[str, TracedReduced], tuple[str, ...]]:
    """Return, by name, the sites reduced by merging channels or heads, and a note if calibration images are missing."""
    if not method.merges and not method.folds_heads:
        return {}, ()
    if images is None:
        raise BadInput(
            "merged channels and heads are fitted to and judged by their outputs on the calibration images; give them: "
            "--images"
        )
    shown = ShownInputs.of(images, moments, held_out)
    note = f"what was merged was fitted and judged on {shown.fitted} of the {moments.images} calibration images"
    own, where = tracing(model), device_of(model)
    if own.merging is not None:
        raise BadInput("merged channels and heads are fitted to all tokens, and this model merges some; leave one out")
    sites = [site for site in sites_of(model).every if site.name in widths]
    with measure_effort(watch, "select"):
        folds = {
            site.name: fold_site(site, stats_of_readers(site, moments, where), method, widths[site.name])
            for site in sites
            if merges_units(site, method)
        }
    _sum_images(model, shown, own, folds.values())
    reduced = dict[str, TracedReduced]()
    for name, fold in folds.items():
        others = None if held_out is None else stats_of_readers(fold.site, held_out, where)
        reduced[name] = fold.reduced(method, others)
    return reduced, (note,) if shown.fitted < moments.images else ()
