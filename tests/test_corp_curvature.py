"""A budget's look at a model: first-order effects, curves between the widths that were tried, images set apart."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from calib.combination import merge, rest
from calib.moments import ChannelMoments, HeadMoments, Moments
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.modules import replaced
from corp_deploy.families.widths import HeadWidths
from corp_deploy.planning.apart import set_apart
from corp_deploy.planning.curvature import linear_effects
from corp_deploy.planning.curves import _in_outputs, _tried, cost_curves, eliminations
from corp_deploy.planning.probe import Probe
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.kind import ErrorCurve
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.inputs import images_for_model
from ground.errors import BadInput

from . import tiny

METHOD = method_from_preset("best", align_hidden=16, align_head=8)


def _slightly_other(layer: nn.Module, scale: float) -> nn.Module:
    other = replaced(layer, {})
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * parameter.std() * torch.randn_like(parameter))
    return other


def test_first_order_effects_are_those_of_small_changes_run_through_the_model() -> None:
    model = tiny.checkpoint().model
    images = torch.from_numpy(tiny.images(12))
    names = ["blocks.0.attn", "blocks.1.mlp"]
    layers = {name: [_slightly_other(model.get_submodule(name), scale) for scale in (0.005, 0.02)] for name in names}
    effects = linear_effects(model, images, layers, directions=400)
    double = replaced(model, {}).double()
    with torch.no_grad():
        dense = double(images.double())
        for name, several in layers.items():
            for layer, effect in zip(several, effects[name], strict=True):
                changed = replaced(double, {name: replaced(layer, {}).double()})(images.double())
                exact = float((changed - dense).square().sum() / dense.square().sum())
                assert effect == pytest.approx(exact, rel=0.15)
    assert effects["blocks.0.attn"][1] > 10 * effects["blocks.0.attn"][0] > 0.0


def test_gradients_are_taken_inside_inference_mode_too() -> None:
    model = tiny.checkpoint().model
    layers = {"blocks.0.mlp": [_slightly_other(model.get_submodule("blocks.0.mlp"), 0.01)]}
    images = torch.from_numpy(tiny.images(4))
    outside = linear_effects(model, images, layers)
    with torch.inference_mode():
        assert linear_effects(model, images.clone(), layers) == outside


def test_a_curve_is_what_was_measured_where_it_was_tried_and_its_own_shape_between() -> None:
    errors = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0)
    curve = ErrorCurve(errors=errors, alone=tuple(range(1, 9)), places=tuple(range(8)))
    tried = _tried(curve)
    assert tried == [1, 3, 5]
    ratios = (3.0, 3.0, 12.0)
    scaled = _in_outputs(curve, [ratio * errors[at] for ratio, at in zip(ratios, tried, strict=True)])
    assert scaled == pytest.approx([24.0, 12.0, 6.0, 3.0, 3.0, 3.0, 1.5, 0.0])
    assert _in_outputs(curve, [0.0, 0.0, 0.0]) == (0.0,) * 8
    constant = ErrorCurve(errors=(90.0, *errors), alone=(0, *range(1, 9)), places=tuple(range(9)))
    assert _tried(constant) == [0, 1, 3, 6]
    of_constant = _in_outputs(constant, [0.5, 24.0, 6.0, 0.75])
    assert of_constant[0] == 0.5
    assert of_constant[1:4] == pytest.approx([24.0, 12.0, 6.0])
    assert _in_outputs(constant, [0.5, 0.0, 0.0, 0.0]) == (0.5, *(0.0,) * 8)
    short = ErrorCurve(errors=(1.0, 0.0), alone=(8, 16), places=(0, 1))
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
    _assert_same(rest(whole, apart), calibrate(dense, images.subset(others), batch_size=8))
    with pytest.raises(BadInput, match="moments to take apart"):
        rest(apart, whole)
    with pytest.raises(BadInput, match="moments to take apart"):
        rest(whole, whole)


def test_a_budget_looks_at_images_that_its_moments_leave_out(folder: Path) -> None:
    dense = tiny.checkpoint()
    images = images_for_model(dense.model, folder / "images.npy")
    moments = calibrate(dense, images, batch_size=8)
    apart = set_apart(dense, moments, images)
    assert isinstance(apart.inputs, torch.Tensor)
    assert len(apart.inputs) == 8
    assert apart.moments.images == 32
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
    dense = tiny.checkpoint()
    site = vit.sites(dense.model).heads[0]
    assert site.v == 16
    attention = dense.model.get_submodule(site.name)
    qkv = attention.get_submodule("qkv")
    assert isinstance(qkv, nn.Linear)
    rows = slice(2 * site.heads * site.qk, None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # values of rank 8 in every head
        for head in qkv.weight[rows].view(site.heads, site.v, -1):
            head[8:] = torch.randn(8, 8, generator=generator) @ head[:8] / 4.0
        if qkv.bias is not None:
            for bias in qkv.bias[rows].view(site.heads, site.v):
                bias.zero_()
    images = images_for_model(dense.model, folder / "images.npy")
    moments = calibrate(dense, images, batch_size=8)
    for geometry in ("padded", "ragged"):
        method = replace(METHOD, geometry=geometry)
        new = reduce(dense.model, moments, method, widths={site.name: HeadWidths(qk=site.qk, v=8)}).model
        assert vit.sites(new).heads[0].width == HeadWidths(qk=site.qk, v=8)
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
    (curve,) = (each for each in cost_curves(probe, "macs") if each.site == site.name)
    of_width = dict(zip(curve.widths, zip(curve.costs, curve.errors, strict=True), strict=True))
    whole, narrow = HeadWidths(qk=16, v=16), HeadWidths(qk=16, v=8)
    assert of_width[narrow][1] <= 1e-3 * of_width[HeadWidths(qk=8, v=16)][1]
    assert of_width[narrow][0] < of_width[whole][0]
    assert of_width[HeadWidths(qk=8, v=8)][1] == pytest.approx(
        of_width[HeadWidths(qk=8, v=16)][1] + of_width[narrow][1]
    )


def test_beside_other_losses_changes_are_from_the_dense_layer_in_that_place() -> None:
    dense, name = tiny.checkpoint().model, "blocks.1.mlp"
    others = {each: _slightly_other(dense.get_submodule(each), 0.3) for each in ("blocks.0.mlp", name)}
    narrower, tried = replaced(dense, others), _slightly_other(dense.get_submodule(name), 0.01)
    images = torch.from_numpy(tiny.images(12))
    whole = {name: dense.get_submodule(name)}
    (effect,) = linear_effects(narrower, images, {name: [tried]}, whole=whole, directions=400)[name]
    with torch.no_grad():
        outputs = [replaced(narrower, {name: layer}).double()(images.double()) for layer in (tried, whole[name])]
        energy = narrower.double()(images.double()).square().sum()
    assert effect == pytest.approx(float((outputs[0] - outputs[1]).square().sum() / energy), rel=0.3)
