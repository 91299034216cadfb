"""A reduction whose model is polished: on which inputs, judged by which, and how the work is shared out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from calib.calibrate import ALONE
from calib.distributed import Ranks
from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.parts import Progress
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.model import Reduction
from corp_deploy.reduction.read_tokens import Reads

from .judging import Judges
from .request import ReductionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Polishing:
    """How a polish is carried out: by which of several processes, with its state in which file, who hears of it."""

    ranks: Ranks = ALONE
    state: Path | None = None
    on_progress: Callable[[Progress], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishInputs:
    """The inputs of a polish: `reduced_on` is what the reduction before it may look at, `fitted` what is fitted to, in
    `groups_B` where they are known, `judges` what neither of them saw; None where some of those fitted have to judge.
    """

    reduced_on: InputSet
    fitted: InputSet
    groups_B: Tensor | None
    judges: InputSet | None


def _groups(images: InputSet, moments: Moments) -> Tensor | None:
    """The group that calibration put each input in."""
    if not len(moments.group_ids):
        return None
    group_of = dict(zip(moments.image_ids.tolist(), moments.group_ids.tolist(), strict=True))
    group_ids = [group_of.get(each) for each in images.ids.tolist()]
    return None if None in group_ids else torch.tensor(group_ids, dtype=torch.int64)


def inputs_to_polish(
    request: ReductionRequest, images: InputSet | None, moments: Moments, judges: Judges | None
) -> PolishInputs | None:
    """The inputs of a polish, None where none is asked for.

    Those that calibration left out (--hold-out) judge; a closed form errs less on inputs that it was fitted to, and so
    would seem better than what follows it. With a limit they judge that, and nothing else.
    """
    if request.polish is None or images is None:
        return None
    if judges is not None:
        fitted, _ = judges.apart(images, moments)
        return PolishInputs(reduced_on=images, fitted=fitted, groups_B=_groups(fitted, moments), judges=None)
    was_seen_B = torch.isin(images.ids, moments.image_ids)
    if bool(was_seen_B.all()) or not bool(was_seen_B.any()):
        return PolishInputs(reduced_on=images, fitted=images, groups_B=_groups(images, moments), judges=None)
    fitted, others = (images.subset(each.nonzero().squeeze(1).tolist()) for each in (was_seen_B, ~was_seen_B))
    return PolishInputs(reduced_on=fitted, fitted=fitted, groups_B=None, judges=others)


def with_polish(
    dense: nn.Module,
    reduction: Reduction,
    options: PolishOptions,
    inputs: PolishInputs,
    how: Polishing,
    *,
    reads: Reads | None,
) -> Reduction:
    """The reduction with its model polished, the report in it."""
    result = polished(
        dense,
        reduction.model,
        inputs.fitted,
        options,
        groups_B=inputs.groups_B,
        judges=inputs.judges,
        reads=reads,
        state=how.state,
        ranks=how.ranks,
        on_progress=how.on_progress,
    )
    decisions = (*reduction.decisions, result.report.line)
    return replace(reduction, model=result.model, decisions=decisions, polish=result.report.as_json())
