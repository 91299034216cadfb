"""Layers of reduced ViTs fitted without a step size: tangents where tokens are merged, no harm done."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from calib.images import Images
from corp_deploy.families import traced_model
from corp_deploy.families.traced_model import tracing
from corp_deploy.polish.blocks import fitted_steps
from corp_deploy.polish.descent import StepBudget
from corp_deploy.polish.newton import Newton
from corp_deploy.polish.segments import segment_sublayer
from corp_deploy.polish.walk import Block, StreamPair, pairs_of, walk
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.module import replaced
from corp_deploy.traced.models.steps import SegmentStep, StreamState
from tests import tiny
from tests.layer_fits import fit_layers_
from tests.test_traced_polish import moved


def opened(model: nn.Module, count: int, seed: int = 0) -> Images:
    return tiny.opened(Path(tempfile.mkdtemp()) / "images.npy", tiny.images(count, seed), model)


def reduced(dense: nn.Module) -> nn.Module:
    """The tiny ViT at half its widths by the closed loop."""
    half = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)
    return reduce_traced(dense, opened(dense, 24), half, loop=Loop()).model


def errors(dense: nn.Module, model: nn.Module, pairs: list[StreamPair]) -> dict[bool, float]:
    """Of the class token behind the last block, which is all that the classes are of, by whether held out."""
    walk(dense, model, pairs, lambda *_: None)
    out = {}
    for held_out in (False, True):
        own = [pair for pair in pairs if pair.held_out == held_out]
        difference = torch.cat([(pair.target - pair.reduced.tokens.x)[:, 0] for pair in own])
        out[held_out] = float(difference.norm() / torch.cat([pair.target[:, 0] for pair in own]).norm())
    return out


@torch.no_grad()
def test_a_segment_of_merged_tokens_is_linearised_as_it_is() -> None:
    """By its own outputs a little ahead and a little behind; a token counts as those that it stands for."""
    dense = tiny.checkpoint(init_values=0.3).model
    model = traced_model.with_merging(reduced(dense), Merging(schedule=(3, 2)))
    heaviest = list[float]()
    passages = {step.name: step for step in traced_model.steps(model) if isinstance(step, SegmentStep) and step.sites}
    sublayers, looked_at = {name: segment_sublayer(model, each) for name, each in passages.items()}, []

    def compare(block: Block, pairs: Sequence[StreamPair]) -> None:
        if (name := block.name) not in fitted_steps(dense, model):
            return
        (pair,), read, passage = pairs, sublayers[name].read, passages[name]
        x_BNC, sizes_BN, _ = pair.reduced.tokens
        tokens = slice(None) if read is None else read
        for step in sublayers[name].steps:
            (piece,), start_RD = step.linearised(pairs), step.rows_RD
            change_RD = torch.randn(start_RD.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            ahead, now, behind = (
                moved(step, share * change_RD, passage, x_BNC, sizes_BN) for share in (1e-5, 0.0, -1e-5)
            )
            expected, lacking = ((ahead - behind) / 2e-5)[:, tokens], (pair.target - now)[:, tokens]
            torch.testing.assert_close(piece.tangent.along(change_RD), expected.flatten(0, 1), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(piece.residual_XO, lacking.flatten(0, 1), rtol=1e-9, atol=1e-9)
            assert (piece.weight_X is None) == (sizes_BN is None)
            heaviest.append(0.0 if piece.weight_X is None else float(piece.weight_X.max()))
        looked_at.append(name)

    (pair, *_) = pairs_of(dense, opened(dense, 6), opened(dense, 6, 1))
    pairs = [StreamPair(pair.dense.double(), None, StreamState.of(pair.reduced.tokens.x.double(), None))]
    list(traced_model.steps(dense))
    for each in (dense, model):
        tracing(each).running.graph.double()
    walk(dense, model, pairs, compare)
    assert looked_at == [f"blocks.{index}.{part}" for index in (0, 1) for part in ("attn", "mlp")]
    assert max(heaviest) > 1.0


@pytest.mark.parametrize("merged", [False, True])
def test_held_out_errors_never_rise_and_fall_at_last(merged: bool) -> None:
    dense = tiny.checkpoint().model
    model = reduced(dense)
    model = traced_model.with_merging(model, Merging(schedule=(2, 2))) if merged else model
    both = [opened(dense, 24), opened(dense, 8, 1)]
    with torch.no_grad():
        before = errors(dense, model, pairs_of(dense, *both))
    fitted = replaced(model, {})
    fits = fit_layers_(dense, fitted, pairs_of(dense, *both), Newton(), sweeps=2)
    assert [fit.part for fit in fits] == list(fitted_steps(dense, model))
    assert all(fit.error <= fit.error_before for fit in fits)
    assert sum(fit.error < fit.error_before for fit in fits) >= 3
    with torch.no_grad():
        after = errors(dense, fitted, pairs_of(dense, *both))
    assert after[False] < 0.95 * before[False]
    assert after[True] < before[True]
    again = replaced(model, {})
    fit_layers_(dense, again, pairs_of(dense, *both), Newton(), sweeps=2)
    for own, other in zip(fitted.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0.0, atol=0.0)


def test_no_time_left_is_the_end_of_the_way() -> None:
    assert StepBudget(steps=None, seconds=0.0).way(0, 0.0) == 1.0
