"""A number of sweeps over each narrower layer of a reduced model, without the pace of a polish."""

import torch
from torch import nn

from corp_deploy.polish.descent import StepBudget
from corp_deploy.polish.layers import walk_layers
from corp_deploy.polish.newton import AlternatingFit, Newton
from corp_deploy.polish.report import PartReport
from corp_deploy.polish.segments import segment_sublayer
from corp_deploy.reduction.streams import Pair
from corp_deploy.traced.models.steps import SegmentStep


@torch.no_grad()
def fit_layers_(dense: nn.Module, model: nn.Module, pairs: list[Pair], how: Newton, *, sweeps: int) -> list[PartReport]:
    """The reduced model's narrower sublayers fitted in place, so many sweeps each, in the order they run."""
    reports = list[PartReport]()

    def fit(step: SegmentStep, name: str, both: list[Pair]) -> None:
        fitted = AlternatingFit(segment_sublayer(model, step), both, how, StepBudget(steps=sweeps, seconds=None))
        position = fitted.start()
        fitted.run(position)
        reports.append(position.report(name))

    walk_layers(dense, model, pairs, fit)
    return reports
