"""A budget's look at a model: first-order effects, curves between the widths that were tried, images set apart."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from calib.combination import difference, merge
from calib.moments import ChannelMoments, HeadMoments, Moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.curves import ErrorCurve, _in_outputs, _tried, cost_curves, eliminations
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
from tests.refusals import rejects

from . import tiny

METHOD = method_from_preset("best", align_hidden=16, align_head=8)


def test_a_curve_is_what_was_measured_where_it_was_tried_and_its_own_shape_between() -> None:
    errors = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0)
    curve = ErrorCurve(errors=errors, widths=tuple(range(1, 9)))
    tried = _tried(curve)
    assert tried == [1, 3, 5]
    ratios = (3.0, 3.0, 12.0)
    scaled = _in_outputs(curve, [ratio * errors[at] for ratio, at in zip(ratios, tried, strict=True)])
    assert scaled == pytest.approx([24.0, 12.0, 6.0, 3.0, 3.0, 3.0, 1.5, 0.0])
    assert _in_outputs(curve, [0.0, 0.0, 0.0]) == (0.0,) * 8
    constant = ErrorCurve(errors=(90.0, *errors), widths=(0, *range(1, 9)))
    assert _tried(constant) == [0, 1, 3, 6]
    of_constant = _in_outputs(constant, [0.5, 24.0, 6.0, 0.75])
    assert of_constant[0] == 0.5
    assert of_constant[1:4] == pytest.approx([24.0, 12.0, 6.0])
    assert _in_outputs(constant, [0.5, 0.0, 0.0, 0.0]) == (0.5, *(0.0,) * 8)
    short = ErrorCurve(errors=(1.0, 0.0), widths=(8, 16))
    assert _tried(short) == [0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("curvature")
    np.save(path / "images.npy", tiny.images(40))
    return path


def _assert_same(one: Moments, other: Moments) -> None:
    assert one.images == other.images
    assert torch.equal(one.image_ids, other.image_ids)
    for name, left in one.sites.items():
        right = other.sites[name]
        assert left.tokens == right.tokens
        if isinstance(left, ChannelMoments):
            assert isinstance(right, ChannelMoments)
            torch.testing.assert_close(left.gram_FF, right.gram_FF, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(left.active_F, right.active_F)
        else:
            assert isinstance(left, HeadMoments)
            assert isinstance(right, HeadMoments)
            torch.testing.assert_close(left.kk_centred_HDD, right.kk_centred_HDD, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(left.z_sum_C, right.z_sum_C, rtol=1e-5, atol=1e-4)


def test_moments_without_some_images_are_those_of_the_rest(folder: Path) -> None:
    dense = tiny.checkpoint()
    images = images_for_model(dense.model, folder / "images.npy")
    whole = calibrate(dense, images, batch_size=8)
    part, others = list(range(0, 40, 5)), [place for place in range(40) if place % 5]
    apart = calibrate(dense, images.subset(part), batch_size=8)
    _assert_same(difference(whole, apart), calibrate(dense, images.subset(others), batch_size=8))
    rejects("moments to take apart", difference, apart, whole)
    rejects("moments to take apart", difference, whole, whole)


def test_a_budget_looks_at_images_that_its_moments_leave_out(folder: Path) -> None:
    dense = tiny.checkpoint()
    images = images_for_model(dense.model, folder / "images.npy")
    moments = calibrate(dense, images, batch_size=8)
    apart = set_apart(dense, moments, images)
    assert isinstance(apart.inputs, torch.Tensor)
    assert (len(apart.inputs), apart.moments.images) == (8, 32)
    again = set_apart(dense, apart.moments, images)
    assert torch.equal(again.inputs, apart.inputs)  # type: ignore[arg-type]
    assert again.moments is apart.moments, "they are left out already"
    few = images.subset(range(10))
    of_few = calibrate(dense, few, batch_size=8)
    every = set_apart(dense, of_few, few)
    assert isinstance(every.inputs, torch.Tensor)
    assert len(every.inputs) == 10
    assert every.moments is of_few


def test_whole_groups_are_looked_at_where_they_are_known(folder: Path) -> None:
    dense = tiny.checkpoint()
    images = images_for_model(dense.model, folder / "images.npy")
    in_half = list(range(0, 40, 2))
    half, other = (calibrate(dense, images.subset(places), batch_size=8) for places in (in_half, range(1, 40, 2)))
    whole = merge(half, other)
    place_of = {image: place for place, image in enumerate(images.ids.tolist())}
    places = [place_of[image] for image in whole.image_ids.tolist()]
    groups = torch.tensor([2 * (place // 8) + place % 2 for place in places])  # ten, of four images, each in one half
    grouped = replace(whole, group_ids=groups, half=half)
    apart = set_apart(dense, grouped, images)
    assert apart.moments.images == 40 - 12
    assert not torch.isin(
        grouped.group_ids[~torch.isin(whole.image_ids, apart.moments.image_ids)], apart.moments.group_ids
    ).any()
    left = [place_of[image] for image in apart.moments.image_ids.tolist()]
    _assert_same(apart.moments, calibrate(dense, images.subset(sorted(left)), batch_size=8))
    assert apart.moments.half is not None
    left_half = [place_of[image] for image in apart.moments.half.image_ids.tolist()]
    assert set(left_half) == set(left) & set(in_half)
    _assert_same(apart.moments.half, calibrate(dense, images.subset(sorted(left_half)), batch_size=8))


def test_of_other_images_no_group_is_known_and_a_few_are_set_apart_all_the_same(folder: Path) -> None:
    dense = tiny.checkpoint()
    images = images_for_model(dense.model, folder / "images.npy")
    half, other = (calibrate(dense, images.subset(places), batch_size=8) for places in (range(20), range(20, 40)))
    whole = merge(half, other)
    groups = torch.isin(whole.image_ids, half.image_ids).long() * 5 + torch.arange(40) % 5
    grouped = replace(whole, group_ids=groups, half=half)
    np.save(folder / "others.npy", tiny.images(24, seed=9))
    apart = set_apart(dense, grouped, images_for_model(dense.model, folder / "others.npy"))
    assert apart.moments is grouped
    assert isinstance(apart.inputs, torch.Tensor)
    assert 0 < len(apart.inputs) <= 6


def test_values_have_a_width_of_their_own_and_are_exact_at_their_rank(folder: Path) -> None:
    dense, name = tiny.checkpoint(), "blocks.0.attn.v"
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # values of rank 8 in every head
        for head in dense.model.get_parameter("blocks.0.attn.qkv.weight")[96:].view(3, 16, -1):
            head[8:] = torch.randn(8, 8, generator=generator) @ head[:8] / 4.0
        dense.model.get_parameter("blocks.0.attn.qkv.bias")[96:] = 0.0
    images = images_for_model(dense.model, folder / "images.npy")
    moments = calibrate(dense, images, batch_size=8)
    new = reduce(dense.model, moments, METHOD, widths={name: 24}).model
    assert sites_of(new).by_name[name].width == 24
    shown = torch.from_numpy(tiny.images(6))
    with torch.no_grad():
        torch.testing.assert_close(new(shown), dense.model(shown), rtol=1e-3, atol=1e-4)
    probe = Probe(
        model=dense.model,
        moments=moments,
        method=METHOD,
        inputs=shown,
        eliminations=eliminations(dense.model, moments, METHOD),
    )
    curves = {each.site: each for each in cost_curves(probe, "macs")}
    cost, error = (
        dict(zip(curves[name].widths, each, strict=True)) for each in (curves[name].costs, curves[name].errors)
    )
    queries = curves["blocks.0.attn.qk"]
    assert error[24] <= 1e-3 * queries.errors[queries.widths.index(24)]
    assert cost[24] < cost[48]


# The probe of a budget and the pool of site workers.

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
