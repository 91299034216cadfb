"""A row of convolutions in a closed loop, place by place: what each convolution reads comes of the row as narrowed so
far, in the model as reduced so far.

GRAIL's loop (`rebuilt_row`) has the dense weights for its target. Ours (`fitted_row`) has the dense stream: an inner
convolution is fitted to what the dense one gives there, the last of a row to what the reduced stream lacks behind the
branch, so that it also makes up for what went missing upstream (see closed_loop.py).

Legend: G groups of a convolution, P outputs of a group and U columns of a patch, k of them kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.patch_moments import PatchMoments
from corp_deploy.algebra.regression_sums import RegressionSums
from corp_deploy.families.conv_block import ConvRow
from corp_deploy.families.conv_site import ConvSite
from corp_deploy.families.modules import with_modules
from corp_deploy.families.steps import Branch
from corp_deploy.families.widths import ConvWidths

from .branch_sums import Halves, dense_advanced
from .conv_channels import Kept, Reading, changes_of, channels_between, group_columns, output_energy
from .conv_modules import Row, conv_report, reading_of
from .conv_sums import DenseOutputs, Lacking, ReadSums, Target, read_sums, regressions, row_of
from .correct import group_corrections
from .kind import Reduced
from .loop import Loop
from .method import Method
from .report import LoopFit, SiteReport
from .streams import Streams

Changes = Sequence[tuple[Tensor, Tensor]]
"""Of a convolution's weights and biases, by group: [P,U] and [P]."""


def _layer(branch: Branch, row: Row) -> ConvRow:
    """The branch's layer with the row's weights as they are by now."""
    layer = with_modules(row_of(branch), branch.name, row.modules())
    assert isinstance(layer, ConvRow), branch.name
    return layer


def _narrow(row: Row, place: int, kept: Kept, sums: ReadSums, method: Method) -> None:
    between = row.site.between[place]
    row.narrow(between, kept)
    for name, means in sums.means.items():
        row.squeeze(name, kept.kept_K, means, method)


def rebuilt_row(branch: Branch, site: ConvSite, streams: Streams, method: Method, width: ConvWidths) -> Reduced:
    """Each place by statistics of the reduced stream, which is still before the branch; no images are held out."""
    streams.gather()
    row, reports = Row.of(site), list[SiteReport]()
    for place, channels in enumerate(width.channels):
        between, reading = site.between[place], reading_of(site, place)
        layer, squeezes = _layer(branch, row), site.squeezes(between)
        sums = read_sums(branch, layer, between.reader, streams, squeezes=squeezes, whole=True)
        kept = channels_between(sums.patches.fit, reading, method, channels)
        _narrow(row, place, kept, sums, method)
        reports.append(conv_report(site, place, method, kept, output_energy(sums.patches.fit, reading), None))
    return row.reduced(reports)


def _left(moments: PatchMoments, reading: Reading, kept: Kept) -> list[RegressionSums]:
    """What is lacking still, on the columns kept, behind the convolution recovered on them."""
    each = zip(regressions(moments), changes_of(kept, reading), group_columns(kept, reading), strict=True)
    return [sums.less(*change).of(columns_k) for sums, change, columns_k in each]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFit:
    """A row being fitted on both streams, the dense one still before the branch until the last place needs it."""

    branch: Branch
    row: Row
    streams: Streams
    method: Method
    loop: Loop

    def aligned(self) -> LoopFit:
        """The first convolution is made to give on the reduced stream what it gave on the dense one."""
        name = next(iter(self.row.site.block.convolutions))
        sums = self._sums(name, DenseOutputs(self.branch, name))
        return self._correct(name, sums.patches.each(regressions), None)

    def fitted(self, place: int, channels: int) -> SiteReport:
        """One place narrowed, and what reads it corrected toward its target."""
        site, both_ways = self.row.site, self.streams.in_halves
        between, dense = site.between[place], reading_of(site, place)
        target = self._target(between.reader)
        squeezes = site.squeezes(between)
        sums = self._sums(between.reader, target, squeezes)
        own, halves = sums.whole(site.name), (sums.patches.fit, sums.patches.held_out)
        reading = self._refitted(dense, sums.patches)
        kept = channels_between(own, reading, self.method, channels, halves=halves if both_ways else None)
        report = conv_report(site, place, self.method, kept, output_energy(own, reading), None)
        _narrow(self.row, place, kept, sums, self.method)
        if squeezes:  # which scale what is read by other numbers now
            left = self._sums(between.reader, target).patches.each(regressions)
        else:
            left = sums.patches.each(lambda moments: _left(moments, dense, kept))
        return replace(report, loop=self._correct(between.reader, left, target.energy))

    def _sums(self, name: str, target: Target, squeezes: Sequence[str] = ()) -> ReadSums:
        layer = _layer(self.branch, self.row)
        return read_sums(self.branch, layer, name, self.streams, target=target, squeezes=squeezes)

    def _target(self, name: str) -> DenseOutputs | Lacking:
        if row_of(self.branch).ends_with(name):
            return Lacking(self.branch, name, dense_advanced(self.branch, self.streams))
        return DenseOutputs(self.branch, name)

    def _refitted(self, reading: Reading, patches: Halves[PatchMoments]) -> Reading:
        """What reads the place fitted to its target before anything is chosen by it (see channel_target.py)."""
        toward_columns = self.method.conv_selection == "obs" and self.method.conv_recovery == "im2col"
        if not (self.loop.refit_first and toward_columns):
            return reading
        changes, _ = self._changes(patches.each(regressions), None)
        weight_GPU = reading.weight_GPU + torch.stack([weight_PU for weight_PU, _ in changes])
        bias_O = reading.bias_O + torch.cat([bias_P for _, bias_P in changes])
        return replace(reading, weight_GPU=weight_GPU, bias_O=bias_O)

    def _changes(self, left: Halves[list[RegressionSums]], energy: float | None) -> tuple[Changes, LoopFit]:
        groups = list(zip(left.fit, left.held_out, strict=True))
        return group_corrections(groups, energy, self.loop.strengths, both_ways=self.streams.in_halves)

    def _correct(self, name: str, left: Halves[list[RegressionSums]], energy: float | None) -> LoopFit:
        changes, fit = self._changes(left, energy)
        self.row.change(name, changes)
        return fit


def fitted_row(
    step: Branch, site: ConvSite, streams: Streams, method: Method, width: ConvWidths, loop: Loop
) -> tuple[Reduced, list[SiteReport]]:
    """Align, narrow and fit a row; the dense stream is behind the branch then, the reduced one still before it."""
    streams.gather()
    row = Row.of(site)
    fit = RowFit(branch=step, row=row, streams=streams, method=method, loop=loop)
    alignment = fit.aligned() if loop.align_inputs else None
    first, *rest = (fit.fitted(place, channels) for place, channels in enumerate(width.channels))
    reports = [replace(first, alignment=alignment), *rest]
    if not row_of(step).ends_with(site.between[-1].reader):
        dense_advanced(step, streams)
    return row.reduced(reports), reports
