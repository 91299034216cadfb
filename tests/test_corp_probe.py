"""The probe of a budget and the pool of site workers."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.curves import eliminations
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.probe import Probe, Trial
from corp_deploy.planning.probe_split import IN_LOOP, set_apart
from corp_deploy.planning.request import request_of
from corp_deploy.reduction import pool as site_pool
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.inputs import images_for_model
from corp_deploy.traced.models.merging import Merging

from . import tiny

CPU = torch.device("cpu")


def probe_of(folder: Path, geometry: str) -> Probe:
    dense = tiny.checkpoint()
    path = folder / "images.npy"
    np.save(path, tiny.images(32))
    method = method_from_preset("best", align_hidden=16, align_head=8, geometry=geometry)
    opened = images_for_model(dense.model, path)
    moments = calibrate(dense, opened, batch_size=8)
    images = next(iter(opened.batches(6)))
    known = eliminations(dense.model, moments, method)
    return Probe(model=dense.model, moments=moments, method=method, inputs=images, eliminations=known)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_walk_finds_what_whole_models_do(tmp_path: Path) -> None:
    probe = probe_of(tmp_path, "square")
    trials: list[Trial] = [
        ("blocks.0.mlp", 16), ("blocks.0.mlp", 32), ("blocks.1.attn.qk", 24), ("blocks.1.attn.v", 24)
    ]  # fmt: skip
    effects = probe.effects(trials)
    assert set(effects) == set(trials)
    plain = replace(probe.method, geometry="ragged", mlp_swaps=False)
    with torch.inference_mode():
        dense = probe.model(probe.inputs).double()
        for site, width in trials:
            alone = reduce(probe.model, probe.moments, plain, widths={site: width}).model
            change = float((alone(probe.inputs).double() - dense).square().sum() / dense.square().sum())
            assert effects[site, width] == pytest.approx(change, rel=1e-3, abs=1e-12)
            assert change > 1e-9


def test_effects_to_first_order_are_found_inside_inference_mode_too(tmp_path: Path) -> None:
    """And are about those of whole models."""
    probe = probe_of(tmp_path, "padded")
    trials: list[Trial] = [("blocks.0.mlp", 176), ("blocks.1.mlp", 176)]
    outside, exact = probe.linear_effects(trials), probe.effects(trials)
    assert all(0.3 < outside[each] / exact[each] < 3.0 for each in trials)
    with torch.inference_mode():
        assert replace(probe, inputs=probe.inputs.clone()).linear_effects(trials) == outside  # type: ignore[union-attr]


@pytest.mark.usefixtures("two_threads")
def test_sites_are_worked_on_side_by_side_and_come_in_order() -> None:
    together = threading.Barrier(2, timeout=20.0)

    def work(item: int) -> tuple[int, int]:
        together.wait()
        return item, torch.get_num_threads()

    assert list(site_pool.each(work, [3, 1, 2, 0], CPU)) == [(3, 1), (1, 1), (2, 1), (0, 1)]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_pool_keeps_modes_and_raises_the_first_error() -> None:
    with torch.inference_mode():
        assert list(site_pool.each(lambda _: torch.is_inference_mode_enabled(), [0, 1], CPU)) == [True, True]
    with torch.no_grad():
        assert list(site_pool.each(lambda _: torch.is_grad_enabled(), [0, 1], CPU)) == [False, False]

    def work(item: int) -> int:
        if item:
            raise ValueError(f"site {item}")
        time.sleep(0.05)
        return item

    with pytest.raises(ValueError, match="site 1"):
        list(site_pool.each(work, [0, 1, 2], CPU))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_reduction_is_the_same_with_one_worker_and_with_two(tmp_path: Path) -> None:
    probe = probe_of(tmp_path, "padded")
    wanted = replace(probe.method, mlp_sparsity=0.5, attention_sparsity=0.5)
    side_by_side = reduce(probe.model, probe.moments, wanted)
    torch.set_num_threads(1)
    alone = reduce(probe.model, probe.moments, wanted)
    assert [site.site for site in side_by_side.sites] == [site.site for site in alone.sites]
    for one, other in zip(side_by_side.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("schedule", [None, Merging(schedule=(2, 2))])
def test_what_a_closed_loop_will_leave_is_tried_in_a_closed_loop(tmp_path: Path, schedule: Merging | None) -> None:
    plain = probe_of(tmp_path, "padded")
    others = images_for_model(plain.model, tmp_path / "images.npy").subset(range(6, 18))
    probe = replace(plain, others=others, loop=Loop())
    widths = {site.name: 16 for site in sites_of(probe.model).every if site.name.endswith("mlp")}
    ragged = replace(probe.method, geometry="ragged")
    model = probe.model if schedule is None else traced_model.with_merging(probe.model, schedule)
    expected = reduce_traced(model, others, ragged, widths=widths, loop=Loop()).model
    assert isinstance(probe.inputs, torch.Tensor)
    with torch.inference_mode():
        got = probe.carried_out(widths, merging=schedule)(probe.inputs)
        assert torch.equal(got, expected(probe.inputs))
        in_one_pass = plain.carried_out(widths, merging=schedule)(probe.inputs)
        assert torch.equal(in_one_pass, probe.narrowed(widths, merging=schedule)(probe.inputs))
    assert not torch.allclose(got, in_one_pass, rtol=1e-4)


def test_a_budget_of_the_closed_loop_is_settled_by_closed_loops(tmp_path: Path) -> None:
    dense = tiny.checkpoint()
    images = tiny.opened(tmp_path / "images.npy", tiny.images(48), dense.model)
    moments, method = calibrate(dense, images, batch_size=8), method_from_preset("best", align_hidden=16, align_head=8)
    request = request_of(ReduceOptions(macs=0.6, closed_loop="asymmetric"), method=method)
    reduction, planned = reduce_as_asked(dense, moments, request, images=images)
    apart = set_apart(dense, moments, images)
    assert isinstance(apart.inputs, torch.Tensor)
    assert apart.others.count == min(IN_LOOP, 48 - len(apart.inputs))
    assert planned.widths is not None
    ragged = replace(method, geometry="ragged")
    known = planned.metrics
    model = reduce_traced(dense.model, apart.others, ragged, widths=planned.widths, loop=Loop(), metrics=known).model
    with torch.inference_mode():
        exact, got = dense.model(apart.inputs).double(), model(apart.inputs).double()
    error = float((got - exact).norm() / exact.norm())
    taken = min((way for way in planned.ways if "by site" in way.name), key=lambda way: way.measured_error)
    assert taken.measured_error == pytest.approx(error, rel=1e-5)
    assert {site.site for site in reduction.sites} == set(planned.widths)
