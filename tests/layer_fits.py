"""A number of sweeps over each narrower layer of a reduced model, without the pace of a polish."""

from collections.abc import Sequence

import torch
from torch import nn

from corp_deploy.polish.newton import Newton, PartReport, SweepBudget, fit_sublayer_
from corp_deploy.polish.polish import fitted_steps
from corp_deploy.polish.segments import segment_sublayer
from corp_deploy.polish.walk import BlockSteps, StreamPair, walk


@torch.no_grad()
def fit_layers_(
    dense: nn.Module, model: nn.Module, pairs: list[StreamPair], how: Newton, *, sweeps: int
) -> list[PartReport]:
    """The reduced model's narrower sublayers fitted in place, so many sweeps each, in the order they run."""
    reports, steps = list[PartReport](), fitted_steps(dense, model)

    def fit(block: BlockSteps, both: Sequence[StreamPair]) -> None:
        if block.name in steps:
            sublayer = segment_sublayer(model, steps[block.name])
            reports.append(fit_sublayer_(sublayer, both, SweepBudget(sweeps=sweeps, seconds=None), how))

    walk(dense, model, pairs, fit)
    return reports
