"""Budgets: error curves, images left out of the moments, probes of widths, and metrics of the outputs."""

import threading
import time
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calib.combination import merge_moments, moments_without
from calib.images import Images
from calib.inputs import input_count
from calib.moments import ChannelMoments, Moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning import curvature
from corp_deploy.planning.curvature import compute_output_metrics
from corp_deploy.planning.curves import ErrorCurve, _in_outputs, _probed_positions, compute_eliminations
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.probe import Probe, SiteTrial
from corp_deploy.planning.probe_split import IN_LOOP, _group_positions, set_apart
from corp_deploy.planning.request import build_request
from corp_deploy.reduction import pool as site_pool
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.moments import site_moments
from corp_deploy.spec.merging import Merging
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import images_for_model
from tests import tiny
from tests.doubles import some
from tests.refusals import rejects
from tests.small_convnets import checkpoint as convnet
from tests.small_convnets import images_of

METHOD = method_from_preset("best", align_hidden=16, align_head=8)
EXACT = replace(METHOD, mlp_swaps=False)
CPU = torch.device("cpu")


def test_curve_passes_measured_points_and_keeps_its_shape_between() -> None:
    errors = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0)
    curve = ErrorCurve(errors=errors, widths=tuple(range(1, 9)))
    tried = _probed_positions(curve)
    assert tried == [1, 3, 5]
    ratios = (3.0, 3.0, 12.0)
    scaled = _in_outputs(curve, [ratio * errors[at] for ratio, at in zip(ratios, tried, strict=True)])
    assert scaled == pytest.approx([24.0, 12.0, 6.0, 3.0, 3.0, 3.0, 1.5, 0.0])
    assert _in_outputs(curve, [0.0, 0.0, 0.0]) == (0.0,) * 8
    constant = ErrorCurve(errors=(90.0, *errors), widths=(0, *range(1, 9)))
    assert _probed_positions(constant) == [0, 1, 3, 6]
    of_constant = _in_outputs(constant, [0.5, 24.0, 6.0, 0.75])
    assert of_constant[0] == 0.5
    assert of_constant[1:4] == pytest.approx([24.0, 12.0, 6.0])
    assert _in_outputs(constant, [0.5, 0.0, 0.0, 0.0]) == (0.5, *(0.0,) * 8)
    short = ErrorCurve(errors=(1.0, 0.0), widths=(8, 16))
    assert _probed_positions(short) == [0]


@pytest.fixture(scope="module")
def dense() -> Checkpoint:
    return tiny.checkpoint()


@pytest.fixture(scope="module")
def images(dense: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Images:
    return tiny.opened(tmp_path_factory.mktemp("curvature") / "images.npy", tiny.images(40), dense.model)


def moments_of(dense: Checkpoint, images: Images, places: Iterable[int] = range(40), **statistics: Any) -> Moments:
    """Calibrate on the images at these places."""
    return calibrate(dense, images.subset(list(places)), batch_size=8, statistics=Statistics(**statistics))


def places_in(images: Images, moments: Moments) -> list[int]:
    """Return the places of the images that the moments are of."""
    return torch.isin(images.ids, moments.image_ids).nonzero().squeeze(1).tolist()


def _assert_same(one: Moments, other: Moments) -> None:
    assert one.images == other.images
    assert torch.equal(one.image_ids, other.image_ids)
    for name, left in one.sites.items():
        right = other.sites[name]
        assert (type(left), left.tokens) == (type(right), right.tokens)
        sums = ("gram_FF", "active_F") if isinstance(left, ChannelMoments) else ("kk_centred_HDD", "z_sum_C")
        for each in sums:
            torch.testing.assert_close(getattr(left, each), getattr(right, each), rtol=1e-5, atol=1e-4)


def test_moments_minus_images_equal_moments_of_the_rest(dense: Checkpoint, images: Images) -> None:
    whole, apart = moments_of(dense, images), moments_of(dense, images, range(0, 40, 5))
    _assert_same(moments_without(whole, apart), moments_of(dense, images, (place for place in range(40) if place % 5)))
    rejects("moments to subtract", moments_without, apart, whole)
    rejects("moments to subtract", moments_without, whole, whole)


def test_budget_judges_on_images_left_out_of_its_moments(dense: Checkpoint, images: Images) -> None:
    apart = set_apart(dense, moments_of(dense, images), images)
    assert (input_count(apart.inputs), apart.moments.images) == (8, 32)
    again = set_apart(dense, apart.moments, images)
    assert torch.equal(torch.as_tensor(again.inputs), torch.as_tensor(apart.inputs))
    assert again.moments is apart.moments, "the images are left out already"
    of_few = moments_of(dense, images, range(10))
    every = set_apart(dense, of_few, images.subset(range(10)))
    assert input_count(every.inputs) == 10
    assert every.moments is of_few


@pytest.mark.slow("models")
@pytest.mark.parametrize(("then", "now"), [((), (2, 2)), ((2, 2), ()), ((2, 2), (1, 1))])
def test_subtracted_images_use_the_merging_of_the_moments(
    dense: Checkpoint, images: Images, then: tuple[int, ...], now: tuple[int, ...]
) -> None:
    """The model's present merging does not matter: sums over other tokens would leave no valid covariance."""
    calibrated, current = (
        replace(dense, model=traced_model.with_merging(dense.model, Merging(schedule=each))) if each else dense
        for each in (then, now)
    )
    apart = set_apart(current, moments_of(calibrated, images), images)
    left = places_in(images, apart.moments)
    assert len(left) == 32
    _assert_same(apart.moments, moments_of(calibrated, images, left))


@pytest.mark.parametrize("statistics", [{"patterns": ("blocks.0*",)}, {"attention": False}, {"active_eps": 0.5}])
def test_subtracted_sums_equal_the_collected_ones(
    dense: Checkpoint, images: Images, statistics: dict[str, Any]
) -> None:
    apart = set_apart(dense, moments_of(dense, images, **statistics), images)
    _assert_same(apart.moments, moments_of(dense, images, places_in(images, apart.moments), **statistics))
    request = build_request(ReduceOptions(macs=0.7))
    if "active_eps" not in statistics:
        rejects("the moments hold no statistics", reduce_as_asked, dense, apart.moments, request, images=images)


def test_known_groups_are_left_out_whole(dense: Checkpoint, images: Images) -> None:
    half, other = (moments_of(dense, images, range(start, 40, 2)) for start in (0, 1))
    whole = merge_moments(half, other)
    place_of = {image: place for place, image in enumerate(images.ids.tolist())}
    places = [place_of[image] for image in whole.image_ids.tolist()]
    groups = torch.tensor([2 * (place // 8) + place % 2 for place in places])  # ten, of four images, each in one half
    grouped = replace(whole, group_ids=groups, half=half)
    apart = set_apart(dense, grouped, images)
    assert apart.moments.images == 40 - 12
    gone = ~torch.isin(whole.image_ids, apart.moments.image_ids)
    assert not torch.isin(groups[gone], apart.moments.group_ids).any()
    half_left = some(apart.moments.half)
    left, left_half = (places_in(images, each) for each in (apart.moments, half_left))
    assert left_half == [place for place in left if place % 2 == 0]
    _assert_same(apart.moments, moments_of(dense, images, left))
    _assert_same(half_left, moments_of(dense, images, left_half))


def test_groups_without_halves_are_left_out_whole_and_evenly(dense: Checkpoint, images: Images) -> None:
    whole = moments_of(dense, images)
    place_of = {image: place for place, image in enumerate(images.ids.tolist())}
    groups = torch.tensor([place_of[image] // 4 for image in whole.image_ids.tolist()])
    apart = set_apart(dense, replace(whole, group_ids=groups), images)
    left = places_in(images, apart.moments)
    gone = sorted({*range(40)} - {*left})
    # A quarter of 40 images is at most 10: three groups of four, from the middle of each third.
    assert gone == [place for group in (1, 5, 8) for place in range(4 * group, 4 * group + 4)]
    assert apart.moments.half is None
    _assert_same(apart.moments, moments_of(dense, images, left))


@pytest.mark.parametrize(("count", "apart"), [(37, 8), (297, 20), (12, 3)])
def test_widths_are_judged_by_several_groups(count: int, apart: int) -> None:
    """Set eight groups apart, or as many as have a quarter of the images."""
    group_of = torch.arange(512) * count // 512
    images: Any = SimpleNamespace(ids=torch.arange(512), count=512)
    moments: Any = SimpleNamespace(image_ids=torch.arange(512), group_ids=group_of)
    places = _group_positions(images, moments)
    chosen = group_of[places].unique()
    assert len(chosen) == apart
    assert places == torch.isin(group_of, chosen).nonzero().squeeze(1).tolist()


def test_ungrouped_images_are_left_out_one_by_one(dense: Checkpoint, images: Images, tmp_path: Path) -> None:
    half, other = moments_of(dense, images, range(20)), moments_of(dense, images, range(20, 40))
    whole = merge_moments(half, other)
    groups = torch.isin(whole.image_ids, half.image_ids).long() * 5 + torch.arange(40) % 5
    grouped = replace(whole, group_ids=groups, half=half)
    apart = set_apart(dense, grouped, tiny.opened(tmp_path / "others.npy", tiny.images(24, seed=9), dense.model))
    assert apart.moments is grouped
    assert 0 < input_count(apart.inputs) <= 6


# The probe of a budget and the pool of site workers.


def probe_of(folder: Path, geometry: HeadGeometry) -> Probe:
    dense = tiny.checkpoint()
    opened = tiny.opened(folder / "images.npy", tiny.images(32), dense.model)
    method, moments = replace(METHOD, geometry=geometry), calibrate(dense, opened, batch_size=8)
    known, images = compute_eliminations(dense.model, moments, method), next(iter(opened.batches(6)))
    return Probe(model=dense.model, moments=moments, method=method, inputs=images, eliminations=known)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_single_walk_equals_evaluating_whole_models(tmp_path: Path) -> None:
    probe = probe_of(tmp_path, "square")
    trials: list[SiteTrial] = [
        ("blocks.0.mlp", 16), ("blocks.0.mlp", 32), ("blocks.1.attn.qk", 24), ("blocks.1.attn.v", 24)
    ]  # fmt: skip
    effects = probe.effects(trials)
    assert set(effects) == set(trials)
    plain, shown = replace(probe.method, geometry="ragged", mlp_swaps=False), torch.as_tensor(probe.inputs)
    for site, width in trials:
        alone = reduce(probe.model, probe.moments, plain, widths={site: width}).model
        change = tiny.relative(tiny.ran(alone, shown), tiny.ran(probe.model, shown)) ** 2
        assert effects[site, width] == pytest.approx(change, rel=1e-3, abs=1e-12)
        assert change > 1e-9


def test_first_order_effects_are_computed_inside_inference_mode(tmp_path: Path) -> None:
    """They are also near the effects measured on whole models."""
    probe = probe_of(tmp_path, "padded")
    trials: list[SiteTrial] = [("blocks.0.mlp", 176), ("blocks.1.mlp", 176)]
    outside, exact = probe.linear_effects(trials), probe.effects(trials)
    assert all(0.3 < outside[each] / exact[each] < 3.0 for each in trials)
    with torch.inference_mode():
        assert replace(probe, inputs=probe.inputs.clone()).linear_effects(trials) == outside  # type: ignore[union-attr]


@pytest.mark.usefixtures("two_threads")
def test_sites_are_processed_in_parallel_and_returned_in_order() -> None:
    together = threading.Barrier(2, timeout=20.0)

    def work(item: int) -> tuple[int, int]:
        together.wait()
        return item, torch.get_num_threads()

    with site_pool.mapping(4, CPU) as each:
        assert list(each(work, [3, 1, 2, 0])) == [(3, 1), (1, 1), (2, 1), (0, 1)]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_worker_pool_keeps_modes_and_raises_the_first_error() -> None:
    with torch.inference_mode(), site_pool.mapping(2, CPU) as each:
        assert list(each(lambda _: torch.is_inference_mode_enabled(), [0, 1])) == [True, True]
    with torch.no_grad(), site_pool.mapping(2, CPU) as each:
        assert list(each(lambda _: torch.is_grad_enabled(), [0, 1])) == [False, False]

    def work(item: int) -> int:
        if item:
            raise ValueError(f"site {item}")
        time.sleep(0.05)
        return item

    with pytest.raises(ValueError, match="site 1"), site_pool.mapping(3, CPU) as each:
        list(each(work, [0, 1, 2]))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_reduction_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    probe = probe_of(tmp_path, "padded")
    method = replace(probe.method, mlp_sparsity=0.5, attention_sparsity=0.5)
    side_by_side = reduce(probe.model, probe.moments, method)
    torch.set_num_threads(1)
    alone = reduce(probe.model, probe.moments, method)
    assert [site.site for site in side_by_side.sites] == [site.site for site in alone.sites]
    for one, other in zip(side_by_side.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow("models")
def test_closed_loop_budget_tries_closed_loops(tmp_path: Path) -> None:
    """The same holds for a probe that merges tokens, and a budget without a loop reduces in one pass."""
    plain, schedule = probe_of(tmp_path, "padded"), Merging(schedule=(2, 2))
    others = images_for_model(plain.model, tmp_path / "images.npy").subset(range(6, 12))
    probe = replace(plain, others=others, loop=Loop())
    widths = {site.name: 16 for site in sites_of(probe.model).every if site.name.endswith("mlp")}
    ragged, shown = replace(probe.method, geometry="ragged"), torch.as_tensor(probe.inputs)
    model = traced_model.with_merging(probe.model, schedule)
    expected = reduce_traced(model, others, ragged, widths=widths, loop=Loop()).model
    got = tiny.ran(probe.carried_out(widths, merging=schedule), shown)
    assert torch.equal(got, tiny.ran(expected, shown))
    in_one_pass = tiny.ran(plain.carried_out(widths, merging=schedule), shown)
    assert torch.equal(in_one_pass, tiny.ran(probe.narrowed(widths, merging=schedule), shown))
    assert not torch.allclose(got, in_one_pass, rtol=1e-4)


def test_closed_loop_budget_is_settled_by_closed_loops(dense: Checkpoint, images: Images) -> None:
    request = replace(build_request(ReduceOptions(macs=0.6, closed_loop="asymmetric")), method=METHOD)
    reduction, planned = reduce_as_asked(dense, moments_of(dense, images), request, images=images)
    apart = set_apart(dense, moments_of(dense, images), images)
    shown = torch.as_tensor(apart.inputs)
    assert apart.others.count == min(IN_LOOP, 40 - len(shown))
    ragged, widths, known = replace(METHOD, geometry="ragged"), some(planned.widths), planned.metrics
    model = reduce_traced(dense.model, apart.others, ragged, widths=widths, loop=Loop(), metrics=known).model
    chosen = min((way for way in planned.ways if "by site" in way.name), key=lambda way: way.measured_error)
    error = tiny.relative(tiny.ran(model, shown), tiny.ran(dense.model, shown))
    assert chosen.measured_error == pytest.approx(error, rel=1e-5)
    assert {site.site for site in reduction.sites} == set(widths)


# Channels are chosen by their effect on the model's outputs.

WEIGHT = "blocks.1.mlp.fc2.weight"


def gradients_of_every_output(dense: nn.Module, name: str, pixels: Tensor, dim: int) -> Tensor:
    """Return gradients [X,O] at a layer, O its channels at `dim`, X every image, output and place, in float64."""
    model = deepcopy(dense).double().requires_grad_(True)
    layer = model.get_submodule(name)
    layer_outputs = list[Tensor]()
    layer.register_forward_hook(lambda _, __, out: layer_outputs.append(out))
    rows = []
    for image in pixels.double():
        with torch.enable_grad():
            outputs = model(image[None]).flatten()
            for output in outputs:
                (gradient,) = torch.autograd.grad(output, layer_outputs[-1], retain_graph=True)
                rows.append(gradient.movedim(dim, -1).flatten(0, -2))
    return torch.cat(rows)


@pytest.mark.parametrize(("name", "weight"), [("vit", WEIGHT), ("resnet18", "layer1.0.conv2.weight")])
def test_output_metrics_are_mean_squared_gradients(
    dense: Checkpoint, images: Images, monkeypatch: pytest.MonkeyPatch, name: str, weight: str
) -> None:
    """Random signs average to them; here each direction is one output in turn, which makes them exact."""
    own, dim = (dense, -1) if name == "vit" else (convnet(name), 1)
    (shown,) = (images.subset(range(3)) if name == "vit" else images_of(name, 3)).batches(3)
    pixels, turn = torch.as_tensor(shown), count()
    outputs = own.model(pixels).shape[1]

    def each_in_turn(like: Tensor, generator: torch.Generator) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(next(turn) % outputs), outputs).to(like).expand_as(like)

    monkeypatch.setattr(curvature, "random_signs", each_in_turn)
    monkeypatch.setattr(curvature, "DIRECTIONS", outputs)
    (found,) = compute_output_metrics(own.model, pixels, {weight}).values()
    rows_XO = gradients_of_every_output(own.model, weight.removesuffix(".weight"), pixels, dim)
    expected = rows_XO.T @ rows_XO / len(rows_XO)
    alike = float(expected.diagonal().mean()) * torch.eye(len(expected), dtype=torch.float64)
    torch.testing.assert_close(found, expected + alike, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def lost_in_outputs(dense: Checkpoint, moments: Moments, metric_OO: Tensor, kept: list[int]) -> float:
    """Return tr(M D C D') of the least-squares weights on the kept channels, in float64."""
    statistics, weight_OF = moments.sites["blocks.1.mlp.fc2"], dense.model.get_parameter(WEIGHT).detach().double()
    assert isinstance(statistics, ChannelMoments)
    covariance = statistics.second_FF - torch.outer(statistics.mean_F, statistics.mean_F)
    root = torch.linalg.cholesky(covariance + 1e-12 * covariance.diagonal().mean() * torch.eye(len(covariance)))
    target = root.T @ weight_OF.T
    change = target - root.T[:, kept] @ torch.linalg.lstsq(root.T[:, kept], target).solution
    return float(((change @ metric_OO) * change).sum())


def test_channels_with_least_effect_on_outputs_are_removed_first(images: Images) -> None:
    dense = tiny.checkpoint(mlp_ratio=0.5)
    moments, generator = moments_of(dense, images, range(24)), torch.Generator().manual_seed(1)
    factor = torch.randn(48, 3, generator=generator, dtype=torch.float64)
    metric_OO = factor @ factor.T + 1e-3 * torch.eye(48, dtype=torch.float64)
    site = sites_of(dense.model).by_name["blocks.1.mlp"]
    order, plain = (
        some(kind_of(site).elimination(site, site_moments(site, replace(moments, metrics=metrics), CPU), EXACT))
        for metrics in ({WEIGHT: metric_OO}, {})
    )
    left = list(range(24))
    for place in range(12):
        lost = {each: lost_in_outputs(dense, moments, metric_OO, [k for k in left if k != each]) for each in left}
        gone = int(order.order_F[place])
        assert lost[gone] <= 1.001 * min(lost.values())
        left.remove(gone)
        assert float(order.error_F[place]) == pytest.approx(lost[gone], rel=0.02)
    assert order.order_F[:12].tolist() != plain.order_F[:12].tolist()


def test_budget_reduction_uses_the_learned_metrics(dense: Checkpoint, images: Images) -> None:
    """The same widths without metrics give another model."""
    moments = moments_of(dense, images)
    request = build_request(ReduceOptions(macs=0.7, align={"mlp": 16, "head": 8}))
    reduction, planned = reduce_as_asked(dense, moments, request, images=images)
    assert planned.metrics.keys() >= {f"blocks.{block}.mlp.fc2.weight" for block in (0, 1)}
    known, plain = (
        reduce(dense.model, replace(moments, metrics=metrics), planned.method, widths=some(planned.widths)).model
        for metrics in (planned.metrics, {})
    )
    pixels = tiny.images(16, seed=3)
    found, expected, other = (tiny.ran(model, pixels).double() for model in (reduction.model, known, plain))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert tiny.relative(other, expected) > 1e-3
