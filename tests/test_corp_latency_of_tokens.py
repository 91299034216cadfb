"""What a budget of latency rests on where tokens are merged: layers at their own tokens, merges alone, the whole."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.planning import latency as latency_grid
from corp_deploy.planning.budget_planner import budget_planner
from corp_deploy.planning.latency import LatencyTarget, Tables, measure_tables
from corp_deploy.planning.latency_of_tokens import MERGE, MergeAlone, latency_at, spread
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.merging import Merging, grown
from corp_deploy.traced.models.parts import STREAM
from corp_deploy.traced.models.token_merging import TokenMerge
from corp_deploy.views.speed import latency_rows
from ground.ports import OutputPort, Port
from perf.bench import latency_table
from tests import tiny
from tests.doubles import FakeClock

from .test_corp_latency import CHOICES, PLAN, FakeRunner, cost_ms

pytestmark = pytest.mark.slow("models")

MERGE_MS, MERGED_MS, WHOLE_MS = 0.25, 1500.0, 2000.0


def fake_ms(module: nn.Module, inputs: tuple[Port, ...], outputs: tuple[OutputPort, ...]) -> float:
    """A layer takes as long as it has parameters and tokens, of images 17; the whole model so long, merging or not."""
    if isinstance(module, MergeAlone):
        return MERGE_MS
    if outputs != (STREAM,):
        merges = any(isinstance(each, TokenMerge) for each in module.modules())
        return MERGED_MS if merges else WHOLE_MS
    return cost_ms(module) * (inputs[0].shape[0] if len(inputs[0].shape) == 2 else 17)


@dataclass(frozen=True)
class Bench:
    where: LatencyTarget

    def tables(self, checkpoint: Checkpoint) -> Tables:
        return measure_tables(checkpoint, CHOICES, self.where)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    clock = FakeClock()

    def runner(module: nn.Module, inputs: tuple[Port, ...], outputs: tuple[OutputPort, ...], *_: Any) -> FakeRunner:
        return FakeRunner(clock, fake_ms(module, inputs, outputs), inputs=inputs)

    monkeypatch.setattr(latency_grid, "_runner", runner)
    monkeypatch.setattr(latency_grid, "cached_table", partial(latency_table.cached_table, clock=clock))
    return Bench(LatencyTarget(backend="torch", batches=(1,), cache=tmp_path, plan=PLAN))


def merged(dense: Checkpoint, *schedule: int, **how: Any) -> Checkpoint:
    return replace(dense, model=traced_model.with_merging(dense.model, Merging(schedule=schedule, **how)))


def test_layers_are_timed_at_the_tokens_that_reach_them_and_merges_alone(bench: Bench) -> None:
    dense = tiny.checkpoint()
    plain, tables = bench.tables(dense), bench.tables(merged(dense, 3, 4))
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
    assert bench.tables(merged(dense, 3, 4)).measured == 0
    assert bench.tables(merged(dense, 3, 3)).measured == 3, "the last MLP, the last merge, the whole model"


def test_many_numbers_of_tokens_are_measured_at_four(bench: Bench) -> None:
    model = merged(tiny.checkpoint(depth=7), *grown(3, 7))
    tables = bench.tables(model)
    assert {len(tables.names[f"blocks.{block}.mlp"]) for block in range(7)} == {4}
    reach = [tables.tokens[f"blocks.{block}.mlp"] for block in range(7)]
    assert len(set(reach)) > 4
    per_token = tables.latency_ms("blocks.0.mlp", 192, 1) / reach[0]
    for block, tokens in enumerate(reach):
        assert tables.latency_ms(f"blocks.{block}.mlp", 192, 1) == pytest.approx(tokens * per_token, rel=1e-3)


def test_between_numbers_of_tokens_it_is_straight(bench: Bench) -> None:
    tables = bench.tables(merged(tiny.checkpoint(), 3, 4))
    of = {tokens: tables.by_name[name] for tokens, name in tables.names["blocks.0.mlp"].items()}
    low, high = (latency_at(of, tokens, 192, 1) for tokens in (10, 14))
    assert latency_at(of, 11, 192, 1) == pytest.approx(0.75 * low + 0.25 * high)
    assert spread((1, 2, 3), 4) == (1, 2, 3)
    assert spread(tuple(range(10)), 4) == (0, 3, 6, 9)


def test_a_budget_is_a_share_of_the_model_with_all_its_tokens(bench: Bench, tmp_path: Path) -> None:
    dense = merged(tiny.checkpoint(), 3, 4)
    images = tiny.opened(tmp_path / "images.npy", tiny.images(12), dense.model)
    moments = calibrate(dense, images, batch_size=4)
    with torch.inference_mode():
        planner = budget_planner(dense, moments, CHOICES, images, currency="latency", where=bench.where)
        found = planner.widths_at(0.7)
    tables = bench.tables(dense)
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


@pytest.mark.parametrize("how", ["merge", "drop"])
def test_a_merge_alone_runs_in_onnx_runtime_as_in_torch(tmp_path: Path, how: Any) -> None:
    alone = MergeAlone(TokenMerge(count=3, protected=1, how=how)).eval()
    where = LatencyTarget(backend="onnxruntime", batches=(2,), cache=tmp_path, threads=1)
    x = np.random.default_rng(0).normal(size=(2, 17, 8)).astype(np.float32)
    inputs = (Port(name="tokens", shape=(17, 8)),)
    with latency_grid._runner(alone, inputs, (STREAM,), where, tmp_path) as runner:
        (given,) = runner({"tokens": x}).values()
    with torch.inference_mode():
        expected = alone(torch.from_numpy(x)).numpy()
    assert given.shape == (2, 14, 8)
    np.testing.assert_allclose(given, expected, atol=1e-5)
