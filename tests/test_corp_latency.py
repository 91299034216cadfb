"""What a budget of latency rests on: tables of a model's own blocks and its own latency, on runners of a fake clock."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from corp_deploy.families.family import sites_of
from corp_deploy.families.widths import aligned_widths
from corp_deploy.planning import latency as latency_grid
from corp_deploy.planning.budget import allocate
from corp_deploy.planning.curves import CostCurve
from corp_deploy.planning.latency import LatencyTarget, Tables, curves_in_time, measure_tables
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.narrowing import at_widths
from ground.feeds import Feeds, Outputs
from ground.ports import LOGITS, OutputPort, Port, image_port
from perf.bench import latency_table
from perf.record.runs import Flat
from perf.timing.laps import Bound, Clock, Laps, Plan
from tests import tiny
from tests.doubles import DoubleOfRunner, FakeClock
from tests.test_traced_chain import own_checkpoint

pytestmark = pytest.mark.slow("models")

CHOICES = method_from_preset("best", align_hidden=16, align_head=8)
PLAN = Plan(min_rounds=6, noise_rounds=0, warm_up_min_s=0.0)


def cost_ms(module: nn.Module) -> float:
    """A millisecond for a thousand parameters."""
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
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tables]:
    """measure_tables with one cache, on runners whose latency is their module's parameters."""
    clock = FakeClock()

    def runner(module: nn.Module, *_: Any) -> FakeRunner:
        return FakeRunner(clock, cost_ms(module))

    monkeypatch.setattr(latency_grid, "_runner", runner)
    monkeypatch.setattr(latency_grid, "cached_table", partial(latency_table.cached_table, clock=clock))
    where = LatencyTarget(backend="torch", batches=(1,), cache=tmp_path, plan=PLAN)
    return lambda checkpoint, method=CHOICES: measure_tables(checkpoint, method, where)


def narrowed(dense: Checkpoint, hidden: int) -> Checkpoint:
    """The same architecture by name and arguments, as a reduced directory has it, with narrower MLPs."""
    return replace(dense, model=at_widths(dense.model, {f"blocks.{at}.mlp": hidden for at in (0, 1)}))


def test_a_reduced_model_is_not_given_the_dense_models_latency(measured: Callable[..., Tables]) -> None:
    dense = tiny.checkpoint()
    reduced = narrowed(dense, 96)
    assert reduced.architecture == dense.architecture
    assert measured(dense).dense.latency_ms(1, 1) == pytest.approx(cost_ms(dense.model), rel=1e-3)
    own = measured(reduced)
    assert own.dense.latency_ms(1, 1) == pytest.approx(cost_ms(reduced.model), rel=1e-3)
    assert own.measured == len(own.by_name) + 1, "tables of its own program, and its own latency"
    assert measured(dense).measured == measured(reduced).measured == 0
    assert measured(tiny.checkpoint(seed=1)).measured == 1, "other weights in the same shapes"


def test_a_budget_of_a_reduced_model_is_a_share_of_its_own_latency(measured: Callable[..., Tables]) -> None:
    dense = tiny.checkpoint()
    measured(dense)
    reduced = narrowed(dense, 96)
    curves = []
    for name in ("blocks.0.mlp", "blocks.1.mlp"):
        widths = aligned_widths(96, CHOICES.align_hidden)
        errors = tuple(float(96 - width) for width in widths)
        curves.append(CostCurve(site=name, widths=widths, costs=widths, cost_now=96, errors=errors))
    priced, total = curves_in_time(curves, measured(reduced), 1)
    assert total == pytest.approx(1e6 * cost_ms(reduced.model), rel=1e-3)
    found = allocate(priced, total, 0.8)
    share = cost_ms(at_widths(reduced.model, found.widths)) / cost_ms(reduced.model)
    assert 0.7 < share <= 0.8
    assert found.share == pytest.approx(share, abs=0.01)


def test_a_traced_models_sites_are_timed_in_the_segments_that_they_stand_in(measured: Callable[..., Tables]) -> None:
    """Alike ones once, and what two sites of a segment save is added up."""
    dense, method = own_checkpoint(), replace(CHOICES, geometry="square", attention_sparsity=0.5)
    tables = measured(dense, method)
    assert sorted(tables.by_name) == [
        "channels of 192, as in h.0",
        "convolution channels of 24, as in stem",
        "queries and keys of 48, as in h.0.attn.qk",
        "queries and keys of 48, as in h.1.attn.qk",  # what makes tokens of the map stands in front of the first
        "values of 48, as in h.0.attn.v",
        "values of 48, as in h.1.attn.v",
    ]
    assert tables.names["h.1"] == tables.names["h.0"]
    curves = []
    for site in sites_of(dense.model).every:
        widths = kind_of(site).offers(site, method)
        errors = tuple(float(widths[-1] - width) ** 2 for width in widths)
        curves.append(CostCurve(site=site.name, widths=widths, costs=widths, cost_now=widths[-1], errors=errors))
    priced, total = curves_in_time(curves, tables, 1)
    assert total == pytest.approx(1e6 * cost_ms(dense.model), rel=1e-2), "layers without a bias are timed with one"
    found = allocate(priced, total, 0.8)
    smaller = dense.model
    for site in sites_of(dense.model).every:
        width = found.widths[site.name]
        assert isinstance(width, int)
        smaller = at_widths(smaller, {site.name: width}) if width < site.width else smaller
    share = cost_ms(smaller) / cost_ms(dense.model)
    assert 0.7 < share <= 0.8
    assert found.share == pytest.approx(share, abs=0.01)
    assert measured(dense, method).measured == 0


def test_a_block_of_other_layers_has_a_table_of_its_own(measured: Callable[..., Tables]) -> None:
    plain = measured(tiny.checkpoint())
    other = measured(tiny.checkpoint(act_layer="relu"))
    assert other.measured == 2, "the MLP's and the whole model's"
    assert other.by_name.keys() == plain.by_name.keys()
