"""Traced models under budgets that choose which tokens are merged: curves, costs, tables, and what is carried out."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.merging import Merging
from corp_deploy.families.model_cost import macs
from corp_deploy.invocation.merging import MergingChoice
from corp_deploy.planning.carry_out import reduce_as_asked
from corp_deploy.planning.latency import LatencyTarget
from corp_deploy.planning.merge_costs import merge_costs_in_macs
from corp_deploy.planning.merge_curves import MergeCurves, merge_curves, merge_places
from corp_deploy.planning.merge_latency import measure_merge_latencies, merge_costs_in_ns
from corp_deploy.planning.request import Budget, ReductionRequest
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.inputs import images_for_model
from tests import tiny

from .test_corp_latency import CHOICES
from .test_corp_latency_of_tokens import MERGE_MS, WHOLE_MS, bench
from .test_corp_merge_latency import anew

__all__ = ["anew", "bench"]


@pytest.fixture(scope="module")
def dense() -> Checkpoint:
    checkpoint = tiny.traced(tiny.checkpoint())
    checkpoint.model.requires_grad_(False)  # as every loaded model is
    return checkpoint


@pytest.fixture(scope="module")
def losses(dense: Checkpoint) -> MergeCurves:
    return merge_curves(dense.model, torch.from_numpy(tiny.images(8)))


def test_places_are_where_attentions_are_added(dense: Checkpoint) -> None:
    first, last = merge_places(dense.model)
    assert (first.before, last.before) == ("blocks.0.attn", "blocks.1.attn")
    assert first.sites == ("blocks.0.mlp", "blocks.1.attn.qk", "blocks.1.attn.v")
    assert (last.behind, last.protected) == (("blocks.1.mlp",), 1)


def test_curves_are_about_what_merging_at_one_block_alone_loses(dense: Checkpoint, losses: MergeCurves) -> None:
    images = torch.from_numpy(tiny.images(8))
    with torch.no_grad():
        whole = dense.model(images)
        for amount in (2, 4):
            merged = family_of(dense.model).with_merging(dense.model, Merging(schedule=(amount, 0)))
            exact = float((merged(images) - whole).square().sum() / whole.square().sum())
            assert 0.3 < losses.errors_LG[0, list(losses.amounts_G).index(amount)] / exact < 4.0
    assert np.abs(losses.errors_LG[1]).max() < 1e-10, "the class token reads nothing that is merged there"


@pytest.mark.parametrize("schedule", [(0, 0), (3, 4), (0, 7), (8, 3), (6, 0)])
def test_costs_are_those_that_are_counted(dense: Checkpoint, losses: MergeCurves, schedule: tuple[int, ...]) -> None:
    picks = [list(losses.amounts_G).index(amount) for amount in itertools.accumulate(schedule)]
    merged = family_of(dense.model).with_merging(dense.model, Merging(schedule=schedule))
    assert merge_costs_in_macs(dense.model, losses).of(picks) == macs(merged)


@pytest.mark.slow("models")
def test_segments_are_priced_once_at_their_tokens(dense: Checkpoint, losses: MergeCurves, anew: LatencyTarget) -> None:
    """By a clock that takes as long as a segment has parameters and tokens."""
    latencies = measure_merge_latencies(dense, CHOICES, losses, anew)
    dense_size = {site.name: site.size_of(site.width) for site in sites_of(dense.model).every}
    mlp, attention = (
        latencies.site_ms(name, size, 17) for name, size in (("blocks.0.mlp", 192), ("blocks.1.attn.qk", 48))
    )
    saved = (3 * (mlp + attention) + 7 * mlp) / 17
    alone = sum(latencies.site_ms(name, dense_size[name], 17) for name in latencies.parts)
    picks = [list(losses.amounts_G).index(amount) for amount in (3, 7)]
    cost = merge_costs_in_ns(dense, losses, latencies).of(picks)
    assert cost == pytest.approx(1e6 * (max(WHOLE_MS, alone) - saved + 2 * MERGE_MS), rel=2e-3)


@pytest.mark.slow("models")
@pytest.mark.parametrize("currency", ["macs", "latency"])
def test_auto_is_carried_out_within_its_budget(
    dense: Checkpoint, tmp_path: Path, anew: LatencyTarget, currency: Any
) -> None:
    np.save(tmp_path / "images.npy", tiny.images(24))
    images = images_for_model(dense.model, tmp_path / "images.npy")
    asked = ReductionRequest(
        preset="best",
        method=replace(CHOICES, mlp_sparsity=0.0, attention_sparsity=0.0),
        budget=Budget(currency=currency, share=0.8, where=anew if currency == "latency" else None),
        merging=MergingChoice(merge_tokens="auto"),
    )
    moments = calibrate(dense, images, batch_size=8)
    reduction, planned = reduce_as_asked(dense, moments, asked, images=images)
    assert family_of(dense.model).merging_of(reduction.model) == planned.merging
    assert any(way.name.startswith("tokens") for way in planned.ways)
    if currency == "macs":
        assert planned.merging is not None
        assert macs(reduction.model) <= 0.8 * macs(dense.model)
