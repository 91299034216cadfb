"""Merge schedules under a budget: error curves, costs, brute-force optima, and joint plans with narrower sites."""

import itertools
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calib.images import Images
from calib.inputs import run_model
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning import joint_planner
from corp_deploy.planning.curves import compute_cost_curves, compute_eliminations, compute_site_curves
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.first_plan import dense_cost
from corp_deploy.planning.joint_planner import ABOUT, JointPlanner, _metrics_beside
from corp_deploy.planning.merge_curves import MergeCurves, amounts_offered, compute_merge_curves
from corp_deploy.planning.merge_prices import prices_in_macs
from corp_deploy.planning.probe import InputEffects, Probe
from corp_deploy.planning.request import ReductionRequest, build_request
from corp_deploy.planning.schedule import (
    MergeCosts,
    find_best_schedule,
    find_shaped_schedule,
    merge_costs_in_macs,
    most_at_once,
    plain_shapes,
)
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.merging import Merging, most_merged, tokens_after
from corp_deploy.store.checkpoint import Checkpoint
from tests.refusals import rejects

from . import tiny

DEPTH = 4


@pytest.fixture(scope="module")
def dense_and_images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Images]:
    """Make a dense model without gradients, as load_checkpoint does, and images of its size."""
    dense = tiny.checkpoint(depth=DEPTH, img_size=48)
    dense.model.requires_grad_(False)
    path = tmp_path_factory.mktemp("schedule") / "images.npy"
    return dense, tiny.opened(path, tiny.images(24, size=48), dense.model)


@pytest.fixture(scope="module")
def probe(dense_and_images: tuple[Checkpoint, Images]) -> Probe:
    dense, images = dense_and_images
    method = method_from_preset("best", align_hidden=32, align_head=8)
    moments, inputs = calibrate(dense, images, batch_size=8), next(iter(images.batches(8)))
    known = compute_eliminations(dense.model, moments, method)
    return Probe(model=dense.model, moments=moments, method=method, inputs=inputs, eliminations=known)


@pytest.fixture(scope="module")
def curves(probe: Probe) -> MergeCurves:
    return compute_merge_curves(probe.model, probe.inputs)


@pytest.mark.slow("models")
def test_merging_error_is_close_to_its_curve(probe: Probe, curves: MergeCurves) -> None:
    """First-order curves are compared with models that merge at one block alone."""
    assert (np.diff(curves.errors_LG, axis=1) >= 0.0).all()
    assert (curves.errors_LG[:, 0] == 0.0).all()
    ratios = []
    for block, amount in itertools.product(range(DEPTH), (4, 12)):
        schedule = tuple(amount * (place == block) for place in range(DEPTH))
        exact = probe.effect_of(probe.narrowed({}, merging=Merging(schedule=schedule)))
        shown = torch.as_tensor(probe.inputs)
        merged = traced_model.with_merging(probe.model, Merging(schedule=schedule))
        change = tiny.relative(tiny.ran(merged, shown), tiny.ran(probe.model, shown)) ** 2
        assert exact == pytest.approx(change, rel=1e-3)
        predicted = curves.errors_LG[block, list(curves.amounts_G).index(amount)]
        if block == DEPTH - 1:  # the class token reads no token that the last block merges
            assert exact == pytest.approx(0.0, abs=1e-10)
            assert predicted == pytest.approx(0.0, abs=1e-10)
            continue
        ratios.append(predicted / exact)
    assert all(0.3 < ratio < 4.0 for ratio in ratios), ratios  # random weights make tokens hardly alike


@pytest.mark.slow("models")
@pytest.mark.parametrize("schedule", [(0, 0, 0, 0), (0, 4, 8, 8)])
def test_predicted_costs_equal_the_count(probe: Probe, curves: MergeCurves, schedule: tuple[int, ...]) -> None:
    costs = merge_costs_in_macs(probe.model, curves)
    picks = [list(curves.amounts_G).index(amount) for amount in itertools.accumulate(schedule)]
    merged = traced_model.with_merging(probe.model, Merging(schedule=schedule))
    assert costs.of(picks) == macs(merged)


def merging_at(tokens: int, amounts_G: Any, cost: float) -> Any:
    """Return the costs [G,G] of merges: `cost` for possible ones, 0 for a merge of no tokens, else infinity."""
    merging_GG = np.full((len(amounts_G), len(amounts_G)), np.inf)
    for one, before in enumerate(amounts_G):
        can = (amounts_G >= before) & (amounts_G - before <= most_merged("merge", tokens - int(before), 1))
        merging_GG[one, can] = cost * (amounts_G[can] > before)
    return merging_GG


def test_schedule_on_the_hull_is_optimal() -> None:
    """No path through three blocks with at most the same cost has a smaller error."""
    random = np.random.default_rng(0)
    amounts_G = np.arange(0, 17, 4)
    errors_LG = np.cumsum(random.uniform(0.1, 1.0, (3, 5)), axis=1) * np.array([[4.0], [2.0], [1.0]])
    errors_LG[:, 0] = 0.0
    curves = MergeCurves(tokens=21, protected=1, amounts_G=amounts_G, errors_LG=errors_LG)
    costs = MergeCosts(
        fixed=3.0, running_LG=np.tile(21.0 - amounts_G, (3, 1)), merging_GG=merging_at(21, amounts_G, 0.5)
    )
    assert most_at_once(21) == 8
    paths = [
        path
        for path in itertools.combinations_with_replacement(range(5), 3)
        if np.isfinite(costs.of(path)) and max(np.diff((0, *path))) <= 2
    ]

    def error(path: tuple[int, ...]) -> float:
        steps = enumerate(itertools.pairwise((0, *path)))
        return sum(float(errors_LG[block, pick] - errors_LG[block, came]) for block, (came, pick) in steps)

    for limit in (60.0, 50.0, 45.0):
        best = find_best_schedule(curves, costs, limit)
        assert best is not None
        assert best.cost <= limit
        as_cheap = [error(path) for path in paths if costs.of(path) <= best.cost]
        assert best.error == pytest.approx(min(as_cheap))
    assert find_best_schedule(curves, costs, 3.0) is None
    nothing = find_best_schedule(curves, costs, 66.0)
    assert nothing is not None
    assert nothing.counts == (0, 0, 0)


def free_merging(tokens: int, blocks: int) -> tuple[MergeCurves, MergeCosts]:
    """Make curves and costs of a model whose blocks cost as much as they have tokens, with free merges."""
    amounts_G = amounts_offered(tokens, round(0.94 * tokens))
    running_LG = np.tile((tokens - amounts_G) / (tokens * blocks), (blocks, 1))
    curves = MergeCurves(tokens=tokens, protected=1, amounts_G=amounts_G, errors_LG=np.zeros(running_LG.shape))
    return curves, MergeCosts(fixed=0.0, running_LG=running_LG, merging_GG=merging_at(tokens, amounts_G, 0.0))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5, 0.4])
def test_plain_schedules_reach_small_budgets(share: float) -> None:
    """257 tokens in 12 blocks, as at 224 pixels, need 20 merges and more a block, and growing ones more than 36."""
    curves, costs = free_merging(257, 12)
    for shape in plain_shapes(12)[1:]:
        plain = find_shaped_schedule(curves, costs, share, shape)
        assert plain is not None
        merging = Merging(schedule=plain.counts)
        behind = tokens_after(merging, 257, 1)  # raises if a block can't merge so many
        assert sum(behind) / (257 * 12) == pytest.approx(plain.cost)
        assert share - 0.01 < plain.cost <= share
        largest = max(plain.counts)
        wanted = np.array([largest * each for each in shape])
        full = [count >= most - 3 for count, most in zip(plain.counts, wanted, strict=True)]
        assert all(full[: full.index(False)] if False in full else full)
        cut = full.index(False) if False in full else 12
        left = (257, *behind)
        for count, entering in list(zip(plain.counts, left, strict=False))[cut:]:
            room = int(curves.amounts_G[-1]) - (257 - entering)
            assert count >= min(most_merged("merge", entering, 1), room) - 3
    growing = find_shaped_schedule(curves, costs, 0.5, plain_shapes(12)[1])
    assert growing is not None
    assert max(growing.counts) > 36


@pytest.fixture(scope="module")
def planned(probe: Probe) -> JointPlanner:
    own = compute_site_curves(probe)
    losses = compute_merge_curves(probe.model, probe.inputs)
    prices = prices_in_macs(probe.model, compute_cost_curves(probe, "macs", curves=own), losses)
    return JointPlanner(
        probe=probe, unfitted=probe, own=own, currency="macs", full_cost=prices.full_cost, losses=losses, prices=prices,
        merging=lambda counts: Merging(schedule=counts),
    )  # fmt: skip


@pytest.mark.slow("models")
@pytest.mark.parametrize("share", [0.9, 0.8, 0.7, 0.6, 0.5])
def test_joint_budget_is_no_worse_than_merging_or_widths_alone(planned: JointPlanner, share: float) -> None:
    probe, ranked, dense = planned.probe, planned.ranked(share), dense_cost(planned.probe.model, "macs")
    for way in ranked[:3]:
        reduced = reduce(probe.model, probe.moments, probe.method, widths=way.widths).model
        merged = traced_model.with_merging(reduced, way.merging)
        assert macs(merged) <= share * dense
        assert macs(merged) / dense == pytest.approx(way.share, rel=1e-9)
    alone = [way for way in ranked if way.merging is None]
    assert len(alone) == 1 or share < 0.6
    assert all(ranked[0].predicted_error <= way.predicted_error for way in alone)
    assert ranked == sorted(ranked, key=lambda way: way.predicted_error)
    assert planned.narrowest() < 0.5


def effects_by_input(probe: Probe, model: nn.Module) -> tuple[float, float]:
    """Return the squared relative difference of the outputs of all inputs together, and of the median input."""
    with torch.inference_mode():
        outputs = (run_model(each, probe.inputs).double().numpy() for each in (model, probe.model))
    pairs = [(np.sum((one - other) ** 2), np.sum(other**2)) for one, other in zip(*outputs, strict=True)]
    moved, energies = zip(*pairs, strict=True)
    ratios = sorted(each / energy for each, energy in pairs)
    return float(sum(moved) / sum(energies)), float(ratios[(len(ratios) - 1) // 2])


@pytest.mark.slow("models")
@pytest.mark.parametrize("about", [1.0, ABOUT, 100.0])
def test_near_ties_prefer_late_plain_schedule(
    planned: JointPlanner, about: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_planner, "ABOUT", about)
    probe, costs, planned = planned.probe, planned.prices.costs, replace(planned, priced={})
    for step in (2, 4):
        limit = (1.0 - 0.05 * step) * macs(probe.model)
        plain = [find_shaped_schedule(planned.losses, costs, limit, shape) for shape in plain_shapes(DEPTH)]
        assert step == 4 or None not in plain, "few tokens have a shape for every saving but the largest"
        offered = [each for each in (*plain, find_best_schedule(planned.losses, costs, limit)) if each is not None]
        assert all(each.cost <= limit for each in offered)
        merged = [probe.narrowed({}, merging=Merging(schedule=each.counts)) for each in offered]
        effects = [effects_by_input(probe, each) for each in merged]
        lost = [(mean * median) ** 0.5 for mean, median in effects]
        (first, *_) = [place for place, each in enumerate(lost) if each <= about**2 * min(lost)]
        stage = planned._priced_merging(step)
        assert stage is not None
        assert stage.merging == Merging(schedule=offered[first].counts)
        assert astuple(stage.lost) == pytest.approx(effects[first], rel=1e-6)
        assert stage.cost <= limit
        assert first == 0 or about < 100.0
    assert find_shaped_schedule(planned.losses, costs, 1.0, [1.0] * DEPTH) is None


@pytest.mark.parametrize(
    ("attended", "chosen"),
    [
        ({"mean": 0.05, "median": 0.01}, "attended"),
        ({"mean": 0.05, "median": 0.02}, "ward"),
        ({"mean": 0.03, "median": 0.04}, "ward"),
    ],
)
def test_metrics_are_compared_by_mean_and_median(
    planned: JointPlanner, attended: dict[str, float], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = {"ward": InputEffects(mean=0.04, median=0.02), "attended": InputEffects(**attended)}
    monkeypatch.setattr(JointPlanner, "_lost", lambda self, merging: lost[merging.metric])
    stage = replace(planned, priced={}, metrics=("attended",))._priced_merging(2)
    assert stage is not None
    assert stage.merging is not None
    assert (stage.merging.metric, stage.lost) == (chosen, lost[chosen])


@pytest.mark.parametrize(
    ("chosen", "model", "expected"),
    [
        ({}, {}, ("attended",)),
        ({"merge_metric": "keys"}, {}, ()),
        ({}, {"class_token": False, "global_pool": "avg"}, ()),
    ],
)
def test_attended_metric_is_tried_beside_the_default(
    chosen: dict[str, Any], model: dict[str, Any], expected: tuple[str, ...]
) -> None:
    asked = ReduceOptions(merge_tokens="auto", macs=0.8, **chosen)
    assert _metrics_beside(tiny.checkpoint(depth=1, **model).model, asked) == expected


def request_of(probe: Probe, merge_tokens: str, **options: Any) -> ReductionRequest:
    method = replace(probe.method, mlp_sparsity=0.0, attention_sparsity=0.0)
    return replace(build_request(ReduceOptions(merge_tokens=merge_tokens, **options)), method=method)


@pytest.mark.slow("models")
def test_auto_merging_needs_and_keeps_a_budget(probe: Probe, dense_and_images: tuple[Checkpoint, Images]) -> None:
    dense, images = dense_and_images
    for loop in (None, "asymmetric"):
        looped = request_of(probe, "auto", macs=0.6, closed_loop=loop)
        reduction, planned = reduce_as_asked(dense, probe.moments, looped, images=images)
        assert planned.merging is not None
        assert sum(planned.merging.schedule) > 0
        assert traced_model.merging_of(reduction.model) == planned.merging
        assert macs(reduction.model) <= 0.6 * macs(dense.model)
        assert any("tokens merged" in line for line in planned.decisions), planned.decisions
        assert min(planned.ways, key=lambda way: way.measured_error * way.median_error).name in planned.decisions[0]
        assert "; merging alone errs 0." in planned.decisions[0]
    for budget, message in (({}, "--merge-tokens auto needs a budget"), ({"params": 0.6}, "keeps every parameter")):
        rejects(message, reduce_as_asked, dense, probe.moments, request_of(probe, "auto", **budget), images=images)


@pytest.mark.slow("models")
def test_budget_with_a_schedule_covers_the_whole_model(
    probe: Probe, dense_and_images: tuple[Checkpoint, Images]
) -> None:
    dense, images = dense_and_images
    reduction, planned = reduce_as_asked(dense, probe.moments, request_of(probe, "4", macs=0.6), images=images)
    merging = traced_model.merging_of(reduction.model)
    assert merging is not None
    assert merging.schedule == (4,) * DEPTH
    share = macs(reduction.model) / macs(dense.model)
    assert share <= 0.6
    assert f"{share:.1%} of the dense macs used" in planned.decisions[0]
    alone = macs(traced_model.with_merging(dense.model, merging)) / macs(dense.model)
    assert alone > 0.6, "the widths had something to do"
    note = "the moments were taken without merged tokens"
    assert any(note in line for line in planned.decisions), "narrower sites were fitted to them"
    for no_fit in ({"macs": 0.6, "closed_loop": "asymmetric"}, {"allow_partial": True}):
        _, planned = reduce_as_asked(dense, probe.moments, request_of(probe, "4", **no_fit), images=images)
        assert not any(note in line for line in planned.decisions), planned.decisions
