"""Latency tables of a model's blocks, merges and the whole model on a fake clock, and budgets and prices from them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calib.images import Images
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import tracing
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning import latency as latency_grid
from corp_deploy.planning.budget import allocate_widths
from corp_deploy.planning.budget_planner import build_budget_planner
from corp_deploy.planning.curves import CostCurve
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.latency import LatencyTables, measure_tables, price_in_time
from corp_deploy.planning.merge_curves import MergeCurves, amounts_offered
from corp_deploy.planning.merge_prices import (
    TOKENS,
    MergeLatencies,
    measure_merge_latencies,
    merge_costs_in_ns,
    prices_by_latencies,
)
from corp_deploy.planning.request import LatencyTarget, ReductionRequest, build_request
from corp_deploy.planning.schedule import MERGE, MergeAlone
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.spec.merging import Merging, grow_schedule, tokens_after
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.traced.models.parts import STREAM
from corp_deploy.traced.models.token_merging import TokenMerge
from corp_deploy.views.latency import latency_rows
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs
from ground.ports import LOGITS, OutputPort, Port, image_port
from perf.bench import latency_table
from perf.record.runs import Flat
from perf.timing.laps import Bound, Clock, Laps, Plan
from tests import tiny
from tests.doubles import DoubleOfRunner, FakeClock
from tests.test_traced_chain import own_checkpoint

CHOICES = method_from_preset("best", align_hidden=16, align_head=8)
Clocked = Callable[[Callable[..., float]], LatencyTarget]
PLAN = Plan(min_rounds=6, noise_rounds=0, warm_up_min_s=0.0)


def cost_ms(module: nn.Module) -> float:
    """Return a millisecond for every thousand parameters."""
    return sum(parameter.numel() for parameter in module.parameters()) / 1e3


@dataclass
class FakeRunner(DoubleOfRunner):
    clock: FakeClock
    ms: float
    inputs: tuple[Port, ...] = (image_port((-1, -1, -1)),)
    outputs: tuple[OutputPort, ...] = (LOGITS,)

    def __call__(self, feeds: Feeds) -> Outputs:
        return {"out": feeds["images"].reshape(len(feeds["images"]), -1)}

    def bind(self, feeds: Feeds) -> Bound:
        return replace(self)

    def laps(self, calls: int, clock: Clock) -> Laps:
        self.clock.pass_ms(calls * self.ms)
        return Laps(calls=calls, wall_ms=calls * self.ms, compute_ms=(self.ms,) * calls)

    def describe(self) -> Flat:
        return {"backend": "fake"}


@pytest.fixture
def clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    """Return a function that makes a target whose runners take `took_ms(module, inputs, outputs)` of a fake clock."""

    def target_with(took_ms: Callable[..., float]) -> LatencyTarget:
        clock = FakeClock()

        def runner(module: nn.Module, inputs: tuple[Port, ...], outputs: tuple[OutputPort, ...], *_: Any) -> FakeRunner:
            return FakeRunner(clock, took_ms(module, inputs, outputs), inputs=inputs)

        monkeypatch.setattr(latency_grid, "_runner", runner)
        monkeypatch.setattr(latency_grid, "cached_table", partial(latency_table.cached_table, clock=clock))
        return LatencyTarget(backend="torch", batches=(1,), cache=tmp_path, plan=PLAN)

    return target_with


@pytest.fixture
def measured(clocked: Clocked) -> Callable[..., LatencyTables]:
    """Return measure_tables on a target whose latency is proportional to a module's parameters."""
    target = clocked(lambda module, *_: cost_ms(module))
    return lambda checkpoint, method=CHOICES: measure_tables(checkpoint, method, target)


def narrowed(dense: Checkpoint, hidden: int) -> Checkpoint:
    """Return a checkpoint with narrower MLPs and, like a reduced directory, the dense architecture."""
    return replace(dense, model=at_widths(dense.model, {f"blocks.{at}.mlp": hidden for at in (0, 1)}))


def curve_of(site: str, widths: tuple[int, ...], power: int) -> CostCurve:
    errors = tuple(float(widths[-1] - width) ** power for width in widths)
    return CostCurve(site=site, widths=widths, costs=widths, cost_now=widths[-1], errors=errors)


def assert_within(model: nn.Module, curves: list[CostCurve], tables: LatencyTables, *, rel: float) -> None:
    """Assert that a budget of 0.8 is a share of the model's own latency and that its widths take the stated share."""
    priced, total = price_in_time(curves, tables, 1)
    assert total == pytest.approx(1e6 * cost_ms(model), rel=rel)
    found = allocate_widths(priced, total, 0.8)
    smaller = model
    for site in sites_of(model).every:
        width = found.widths.get(site.name, site.width)
        smaller = at_widths(smaller, {site.name: width}) if width < site.width else smaller
    share = cost_ms(smaller) / cost_ms(model)
    assert 0.7 < share <= 0.8
    assert found.share == pytest.approx(share, abs=0.01)


@pytest.mark.slow("models")
def test_reduced_model_does_not_reuse_dense_latency(measured: Callable[..., LatencyTables]) -> None:
    dense = tiny.checkpoint()
    reduced = narrowed(dense, 96)
    assert reduced.architecture == dense.architecture
    assert measured(dense).dense.latency_ms(1, 1) == pytest.approx(cost_ms(dense.model), rel=1e-3)
    own = measured(reduced)
    assert own.dense.latency_ms(1, 1) == pytest.approx(cost_ms(reduced.model), rel=1e-3)
    assert own.measured == len(own.by_name) + 1, "tables of its own program, and its own latency"
    assert measured(dense).measured == measured(reduced).measured == 0
    assert measured(tiny.checkpoint(seed=1)).measured == 1, "other weights in the same shapes"


@pytest.mark.slow("models")
def test_sites_are_timed_within_their_segments(measured: Callable[..., LatencyTables]) -> None:
    """Equal segments are timed once, and the savings of two sites of a segment add up."""
    dense, method = own_checkpoint(), replace(CHOICES, geometry="square", attention_sparsity=0.5)
    tables = measured(dense, method)
    assert sorted(tables.by_name) == [
        "channels of 192, as in h.0",
        "convolution channels of 24, as in stem",
        "queries and keys of 48, as in h.0.attn.qk",
        "queries and keys of 48, as in h.1.attn.qk",  # the first block's segment also turns the map into tokens
        "values of 48, as in h.0.attn.v",
        "values of 48, as in h.1.attn.v",
    ]
    assert tables.names["h.1"] == tables.names["h.0"]
    curves = [curve_of(site.name, kind_of(site).offers(site, method), 2) for site in sites_of(dense.model).every]
    assert_within(dense.model, curves, tables, rel=1e-2)  # layers without a bias are timed with one
    assert measured(dense, method).measured == 0


MERGE_MS, MERGED_MS, WHOLE_MS = 0.25, 1500.0, 2000.0


def fake_ms(module: nn.Module, inputs: tuple[Port, ...], outputs: tuple[OutputPort, ...]) -> float:
    """Return a layer's parameters times its tokens (17 for images), and constants for a merge and a whole model."""
    if isinstance(module, MergeAlone):
        return MERGE_MS
    if outputs != (STREAM,):
        merges = any(isinstance(each, TokenMerge) for each in module.modules())
        return MERGED_MS if merges else WHOLE_MS
    return cost_ms(module) * (inputs[0].shape[0] if len(inputs[0].shape) == 2 else 17)


Bench = Callable[[Checkpoint], LatencyTables]


@pytest.fixture
def where(clocked: Clocked) -> LatencyTarget:
    return clocked(fake_ms)


@pytest.fixture
def bench(where: LatencyTarget) -> Bench:
    return lambda checkpoint: measure_tables(checkpoint, CHOICES, where)


def merged(dense: Checkpoint, *schedule: int, **how: Any) -> Checkpoint:
    return replace(dense, model=traced_model.with_merging(dense.model, Merging(schedule=schedule, **how)))


@pytest.mark.slow("models")
def test_layers_are_timed_at_their_token_counts_and_merges_separately(bench: Bench) -> None:
    dense = tiny.checkpoint()
    plain, tables = bench(dense), bench(merged(dense, 3, 4))
    assert (plain.merges, plain.all_tokens) == ({}, None)
    assert plain.model_ms(1) == pytest.approx(WHOLE_MS, rel=1e-3)
    mlp = plain.latency_ms("blocks.0.mlp", 192, 1) / 17
    assert plain.latency_ms("blocks.1.mlp", 192, 1) == pytest.approx(17 * mlp)
    for site, tokens in (("blocks.0.mlp", 14), ("blocks.1.mlp", 10)):
        assert tables.latency_ms(site, 192, 1) == pytest.approx(tokens * mlp, rel=1e-3)
    fewer, whole = (each.latency_ms("blocks.1.attn.v", 48, 1) for each in (tables, plain))
    assert fewer == pytest.approx(whole * 14 / 17, rel=1e-3)
    assert tables.merging_ms(1) == pytest.approx(2 * MERGE_MS, rel=1e-3)
    assert tables.dense.latency_ms(1, 1) == pytest.approx(MERGED_MS, rel=1e-3)
    assert tables.model_ms(1) == pytest.approx(WHOLE_MS, rel=1e-3)
    shown = [row["block"] for row in latency_rows(tables, (1,))]
    assert sum(name.startswith(MERGE) for name in shown) == 2
    assert shown[-2:] == ["dense model", "dense model with all tokens"]
    assert bench(merged(dense, 3, 4)).measured == 0
    assert bench(merged(dense, 3, 3)).measured == 3, "the last MLP, the last merge, the whole model"


@pytest.mark.slow("models")
def test_many_token_counts_are_measured_at_four(bench: Bench) -> None:
    model = merged(tiny.checkpoint(depth=7), *grow_schedule(3, 7))
    tables = bench(model)
    assert {len(tables.names[f"blocks.{block}.mlp"]) for block in range(7)} == {4}
    reach = [tables.tokens[f"blocks.{block}.mlp"] for block in range(7)]
    assert len(set(reach)) > 4
    per_token = tables.latency_ms("blocks.0.mlp", 192, 1) / reach[0]
    for block, tokens in enumerate(reach):
        assert tables.latency_ms(f"blocks.{block}.mlp", 192, 1) == pytest.approx(tokens * per_token, rel=1e-3)


@pytest.mark.slow("models")
def test_latency_budget_is_a_share_of_the_model_with_all_tokens(
    bench: Bench, where: LatencyTarget, tmp_path: Path
) -> None:
    dense = merged(tiny.checkpoint(), 3, 4)
    images = tiny.opened(tmp_path / "images.npy", tiny.images(12), dense.model)
    moments = calibrate(dense, images, batch_size=4)
    with torch.inference_mode():
        options = ReduceOptions(latency=0.7, latency_tables=where.cache)
        planner = build_budget_planner(
            dense, moments, ReductionRequest(options=options, method=CHOICES, where=where), images
        )
        found = planner.widths_at(0.7)
    tables = bench(dense)
    assert planner.total == pytest.approx(1e6 * MERGED_MS, rel=1e-3)
    assert planner.full_cost == pytest.approx(1e6 * WHOLE_MS, rel=1e-3)
    saved = sum(
        tables.latency_ms(site.name, site.width, 1) - tables.latency_ms(site.name, (found.widths or {})[site.name], 1)
        for site in sites_of(dense.model).every
    )
    share = (MERGED_MS - saved) / WHOLE_MS
    assert share <= 0.7 < MERGED_MS / WHOLE_MS
    assert f"budget: {share:.1%} of the dense latency" in found.decisions[0]
    assert "merging tokens takes about 0.500 ms of it, measured alone" in found.decisions[0]


@pytest.mark.slow("models")
@pytest.mark.parametrize("how", ["merge", "drop"])
def test_single_merge_in_onnxruntime_equals_torch(tmp_path: Path, how: Any) -> None:
    alone = MergeAlone(TokenMerge(count=3, protected=1, how=how)).eval()
    where = LatencyTarget(backend="onnxruntime", batches=(2,), cache=tmp_path, threads=1)
    x = np.random.default_rng(0).normal(size=(2, 17, 8)).astype(np.float32)
    inputs = (Port(name="tokens", shape=(17, 8)),)
    with latency_grid._runner(alone, inputs, (STREAM,), where, tmp_path) as runner:
        (found,) = runner({"tokens": x}).values()
    assert found.shape == (2, 14, 8)
    np.testing.assert_allclose(found, tiny.ran(alone, x).numpy(), atol=1e-5)


LOSSES = MergeCurves(tokens=17, protected=1, amounts_G=amounts_offered(17, 14), errors_LG=np.zeros((2, 15)))


@pytest.fixture
def sharing(where: LatencyTarget, tmp_path_factory: pytest.TempPathFactory) -> LatencyTarget:
    """Return the target with a cache that all tests share."""
    return replace(where, cache=tmp_path_factory.getbasetemp() / "latency-tables")


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


def asked(target: LatencyTarget, **options: Any) -> ReductionRequest:
    latency = ReduceOptions(merge_tokens="auto", latency_tables=target.cache, **options)
    method = replace(CHOICES, mlp_sparsity=0.0, attention_sparsity=0.0)
    return replace(build_request(latency), method=method, where=target)


def milliseconds(dense: Checkpoint, model: nn.Module, schedule: tuple[int, ...]) -> float:
    """Return a model's time on the fake clock: its segments at their tokens, its merges, and the unexplained rest."""
    after = tokens_after(Merging(schedule=schedule), 17, 1)
    tokens = {"blocks.0.attn": 17, "blocks.0.mlp": after[0], "blocks.1.attn": after[0], "blocks.1.mlp": after[1]}

    def took(model: nn.Module, name: str, count: int) -> float:
        return cost_ms(next(each.module for each in tracing(model).segments if each.name == name)) * count

    layers = sum(took(dense.model, name, 17) for name in tokens)
    now = sum(took(model, name, count) for name, count in tokens.items())
    return WHOLE_MS - layers + now + MERGE_MS * sum(count > 0 for count in schedule)


OTHERS = [pytest.param(each, marks=pytest.mark.slow("models")) for each in ((0, 0), (3, 4), (0, 7), (8, 3))]


@pytest.mark.parametrize("schedule", [*OTHERS, (6, 0)])
def test_few_measurements_price_every_schedule(
    dense: Checkpoint, sharing: LatencyTarget, schedule: tuple[int, ...]
) -> None:
    latencies = measure_merge_latencies(dense, CHOICES, LOSSES, sharing)
    costs = merge_costs_in_ns(dense, LOSSES, latencies)
    picks = [sum(schedule[: block + 1]) for block in range(2)]
    expected = milliseconds(dense, dense.model, schedule)
    assert costs.of(picks) == pytest.approx(1e6 * expected, rel=2e-3)
    prices = prices_by_latencies(dense, [], LOSSES, latencies)
    merged = traced_model.with_merging(dense.model, Merging(schedule=schedule))
    _, cost = prices.priced(merged)
    assert cost == pytest.approx(costs.of(picks), rel=1e-6)
    assert prices.full_cost == pytest.approx(1e6 * WHOLE_MS, rel=2e-3)


@pytest.mark.slow("models")
def test_measurements_are_bounded_and_cached(dense: Checkpoint, where: LatencyTarget) -> None:
    measure_merge_latencies(dense, CHOICES, LOSSES, where)
    kept = {path: path.stat().st_mtime_ns for path in where.cache.iterdir()}
    cells = sum(len(latency_table.load_table(path).cells) for path in kept)
    # The first block's attention before every merge, three layers after merges, merges of two sizes (of three tokens
    # one size only), and the whole model.
    assert len(kept) == 2 + 3 * TOKENS + (2 * TOKENS - 1) + 1
    assert cells <= 48
    same = measure_merge_latencies(dense, CHOICES, LOSSES, where)
    assert {path: path.stat().st_mtime_ns for path in where.cache.iterdir()} == kept
    deeper = tiny.checkpoint(depth=4)
    measure_merge_latencies(deeper, CHOICES, LOSSES, where)
    assert len(list(where.cache.iterdir())) == len(kept) + 1, "more blocks of the same shape: the whole model alone"
    assert same.merge_ms(17, 0) == 0.0


@pytest.mark.slow("models")
def test_merge_times_are_interpolated_linearly() -> None:
    """The time is interpolated by the share of the tokens that can merge, then by the number of tokens."""

    def table(ms: float) -> latency_table.LatencyTable:
        cell = latency_table.Cell(width=1, batch=1, samples_ms=(ms,), disturbed=False)
        return latency_table.LatencyTable(name="merge", fingerprint="", describe={}, inputs=(), cells=(cell,))

    merges = {41: {4: table(1.0), 20: table(5.0)}, 21: {2: table(0.5), 10: table(2.5)}}
    latencies = MergeLatencies(sites={}, merges=merges, protected=1, dense=table(9.0), batch=1)
    assert latencies.merge_ms(41, 20) == pytest.approx(5.0)
    assert latencies.merge_ms(41, 12) == pytest.approx(3.0)
    assert latencies.merge_ms(21, 6) == pytest.approx(1.5)
    assert latencies.merge_ms(31, 9) == pytest.approx((1.5 + 3.0) / 2)  # 9 of 15 as 12 of 20 and 6 of 10


@pytest.mark.slow("models")
def test_disturbed_measurement_is_refused(
    dense: Checkpoint, where: LatencyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = vars(latency_grid)["cached_table"]

    def disturbed(*args: Any, **kwargs: Any) -> tuple[latency_table.LatencyTable, bool]:
        table, cached = measured(*args, **kwargs)
        return replace(table, cells=tuple(replace(cell, disturbed=True) for cell in table.cells)), cached

    monkeypatch.setattr(latency_grid, "cached_table", disturbed)
    with pytest.raises(BadInput, match="other programs had the machine"):
        measure_merge_latencies(dense, CHOICES, LOSSES, where)


@pytest.mark.slow("models")
@pytest.mark.parametrize("share", [0.9, 0.75])
def test_latency_budget_chooses_schedule_and_widths(
    dense: Checkpoint, images: Images, moments: Moments, sharing: LatencyTarget, share: float
) -> None:
    reduction, planned = reduce_as_asked(dense, moments, asked(sharing, latency=share), images=images)
    schedule = (0, 0) if planned.merging is None else planned.merging.schedule
    took = milliseconds(dense, reduction.model, schedule) / WHOLE_MS
    assert took <= share + 1e-3
    assert f"of the dense latency predicted of {share:.1%} allowed" in planned.decisions[0]
    assert planned.predicted_speedup == pytest.approx(1.0 / took, rel=1e-2)
    assert any(way.name.startswith("tokens") for way in planned.ways)
