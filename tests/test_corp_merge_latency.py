"""Schedules and widths chosen together by time: few measurements price all schedules, and budgets are held by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from calib.images import Images
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.families.traced_model import tracing
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning import latency as latency_grid
from corp_deploy.planning import merge_latency
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.judging import Judges
from corp_deploy.planning.latency import LatencyTarget
from corp_deploy.planning.merge_curves import MergeCurves, amounts_offered
from corp_deploy.planning.merge_latency import TOKENS, MergeLatencies, measure_merge_latencies, merge_costs_in_ns
from corp_deploy.planning.merge_prices import prices_by_latencies
from corp_deploy.planning.request import ReductionRequest, request_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.merging import Merging, tokens_after
from ground.errors import BadInput
from perf.bench import latency_table
from tests import tiny

from .test_corp_latency import CHOICES, cost_ms
from .test_corp_latency_of_tokens import MERGE_MS, WHOLE_MS, Bench, bench

pytestmark = pytest.mark.slow("models")

__all__ = ["bench"]
LOSSES = MergeCurves(tokens=17, protected=1, amounts_G=amounts_offered(17, 14), errors_LG=np.zeros((2, 15)))


@pytest.fixture
def anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> LatencyTarget:
    """On runners of a fake clock: layers take as long as they have parameters and tokens, merges MERGE_MS each."""
    monkeypatch.setattr(merge_latency, "cached_table", vars(latency_grid)["cached_table"])
    return bench.where


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@pytest.fixture
def where(anew: LatencyTarget, tables: Path) -> LatencyTarget:
    """The same, of whose measurements those that another test has made are taken."""
    return replace(anew, cache=tables)


@pytest.fixture(scope="module")
def dense() -> Checkpoint:
    checkpoint = tiny.checkpoint()
    checkpoint.model.requires_grad_(False)  # as every loaded model is
    return checkpoint


@pytest.fixture(scope="module")
def images(dense: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Images:
    return tiny.opened(tmp_path_factory.mktemp("latency") / "images.npy", tiny.images(24), dense.model)


@pytest.fixture(scope="module")
def moments(dense: Checkpoint, images: Images) -> Moments:
    return calibrate(dense, images, batch_size=8)


def asked(where: LatencyTarget, **options: Any) -> ReductionRequest:
    latency = ReduceOptions(merge_tokens="auto", latency_tables=where.cache, **options)
    method = replace(CHOICES, mlp_sparsity=0.0, attention_sparsity=0.0)
    return replace(request_of(latency, method=method), where=where)


def milliseconds(dense: Checkpoint, model: nn.Module, schedule: tuple[int, ...]) -> float:
    """What the fake clock gives a model: its segments at their tokens, its merges, and what no segment explains."""
    behind = tokens_after(Merging(schedule=schedule), 17, 1)
    tokens = {"blocks.0.attn": 17, "blocks.0.mlp": behind[0], "blocks.1.attn": behind[0], "blocks.1.mlp": behind[1]}

    def took(of: nn.Module, name: str, count: int) -> float:
        return cost_ms(next(each.module for each in tracing(of).segments if each.name == name)) * count

    layers = sum(took(dense.model, name, 17) for name in tokens)
    now = sum(took(model, name, count) for name, count in tokens.items())
    return WHOLE_MS - layers + now + MERGE_MS * sum(count > 0 for count in schedule)


@pytest.mark.parametrize("schedule", [(0, 0), (3, 4), (0, 7), (8, 3), (6, 0)])
def test_a_few_measurements_price_every_schedule(
    dense: Checkpoint, where: LatencyTarget, schedule: tuple[int, ...]
) -> None:
    latencies = measure_merge_latencies(dense, CHOICES, LOSSES, where)
    costs = merge_costs_in_ns(dense, LOSSES, latencies)
    picks = [sum(schedule[: block + 1]) for block in range(2)]
    expected = milliseconds(dense, dense.model, schedule)
    assert costs.of(picks) == pytest.approx(1e6 * expected, rel=2e-3)
    prices = prices_by_latencies(dense, [], LOSSES, latencies, where)
    merged = traced_model.with_merging(dense.model, Merging(schedule=schedule))
    _, cost = prices.priced(merged)
    assert cost == pytest.approx(costs.of(picks), rel=1e-6)
    assert prices.full_cost == pytest.approx(1e6 * WHOLE_MS, rel=2e-3)


def test_what_is_measured_is_bounded_and_kept(dense: Checkpoint, anew: LatencyTarget) -> None:
    measure_merge_latencies(dense, CHOICES, LOSSES, anew)
    kept = {path: path.stat().st_mtime_ns for path in anew.cache.iterdir()}
    cells = sum(len(latency_table.load_table(path).cells) for path in kept)
    # The first block's attention, ahead of every merge; layers behind merges; of three tokens a merge has one size.
    assert len(kept) == 2 + 3 * TOKENS + (2 * TOKENS - 1) + 1
    assert cells <= 48
    again = measure_merge_latencies(dense, CHOICES, LOSSES, anew)
    assert {path: path.stat().st_mtime_ns for path in anew.cache.iterdir()} == kept
    deeper = tiny.checkpoint(depth=4)
    measure_merge_latencies(deeper, CHOICES, LOSSES, anew)
    assert len(list(anew.cache.iterdir())) == len(kept) + 1, "more blocks of the same shape: the whole model alone"
    assert again.merge_ms(17, 0) == 0.0


def test_merges_between_those_measured_are_straight() -> None:
    """By the share of what can be merged at once, then by tokens."""

    def table(ms: float) -> latency_table.LatencyTable:
        cell = latency_table.Cell(width=1, batch=1, samples_ms=(ms,), disturbed=False)
        return latency_table.LatencyTable(name="merge", fingerprint="", describe={}, inputs=(), cells=(cell,))

    merges = {41: {4: table(1.0), 20: table(5.0)}, 21: {2: table(0.5), 10: table(2.5)}}
    latencies = MergeLatencies(sites={}, merges=merges, protected=1, dense=table(9.0), batch=1)
    assert latencies.merge_ms(41, 20) == pytest.approx(5.0)
    assert latencies.merge_ms(41, 12) == pytest.approx(3.0)
    assert latencies.merge_ms(21, 6) == pytest.approx(1.5)
    assert latencies.merge_ms(31, 9) == pytest.approx((1.5 + 3.0) / 2)  # 9 of 15 as 12 of 20 and 6 of 10


def test_a_disturbed_measurement_is_refused(
    dense: Checkpoint, anew: LatencyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = vars(merge_latency)["cached_table"]

    def disturbed(*given: Any, **how: Any) -> tuple[latency_table.LatencyTable, bool]:
        table, cached = measured(*given, **how)
        return replace(table, cells=tuple(replace(cell, disturbed=True) for cell in table.cells)), cached

    monkeypatch.setattr(merge_latency, "cached_table", disturbed)
    with pytest.raises(BadInput, match="other programs had the machine"):
        measure_merge_latencies(dense, CHOICES, LOSSES, anew)


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_a_budget_of_latency_chooses_schedule_and_widths(
    dense: Checkpoint, images: Images, moments: Moments, where: LatencyTarget, share: float
) -> None:
    reduction, planned = reduce_as_asked(dense, moments, asked(where, latency=share), images=images)
    schedule = (0, 0) if planned.merging is None else planned.merging.schedule
    took = milliseconds(dense, reduction.model, schedule) / WHOLE_MS
    assert took <= share + 1e-3
    assert f"of the dense latency predicted of {share:.1%} allowed" in planned.decisions[0]
    assert planned.predicted_speedup == pytest.approx(1.0 / took, rel=1e-2)
    assert any(way.name.startswith("tokens") for way in planned.ways)


def test_a_limit_is_held_by_the_fastest(
    dense: Checkpoint, images: Images, moments: Moments, where: LatencyTarget
) -> None:
    fitted = calibrate(dense, images.subset(range(16)), batch_size=8)
    request = asked(where, within="error 0.6")
    _, planned = reduce_as_asked(dense, fitted, request, images=images, judges=Judges())
    assert "of the dense latency gives" in planned.decisions[0]
    assert planned.merging is not None
