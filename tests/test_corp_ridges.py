"""Ridges chosen on halves of the images, compared with searches in float64, and the reported overfitting."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from calib.combination import moments_without
from calib.moments import Moments
from calib.store import load_moments
from corp_deploy.algebra.ridges import RIDGES, choose_ridge, ridges_from
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.overfitting import estimate_from_splits, estimate_overfitting
from corp_deploy.reduction.snapshots import moments_in_splits
from corp_deploy.store.checkpoint import save
from tests import tiny
from tests.command import invoked, refuses

COUNT, CROPS = 24, 4


def photographs() -> np.ndarray:
    """Make crops of a few photographs, alike within a photograph and different between them."""
    base = tiny.images(COUNT // CROPS, seed=1).repeat(CROPS, axis=0)
    return (base + 0.05 * tiny.images(COUNT, seed=2)).astype(np.float32)


GROUPS = [number // CROPS for number in range(COUNT)]


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Moments:
    dense, statistics = tiny.checkpoint(), Statistics(attention_system=True)
    return moments_in_splits(
        tiny.opened(tmp_path_factory.mktemp("images") / "images.npy", photographs()),
        torch.tensor(GROUPS),
        lambda half, number: calibrate(dense, half, batch_size=8, statistics=statistics),
        seed=0,
    )


def tokens_of(seed: int, count: int, width: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank or width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    return torch.randn(count, rank or width, dtype=torch.float64, generator=generator) @ mix + 0.3


def ridge_fit(x_XF: Tensor, weight_OF: Tensor, kept: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Minimise mean |W x - W' x_K - b'|^2 + ridge |W' - W_K|^2 over W' and b', by lstsq over rows of tokens."""
    x_XK = x_XF[:, kept]
    mean_K, y_XO = x_XK.mean(0), x_XF @ weight_OF.T
    centred_XK = x_XK - mean_K
    left_XO = (y_XO - y_XO.mean(0)) - centred_XK @ weight_OF[:, kept].T
    ridge = strength * centred_XK.square().mean()
    rows = torch.cat((centred_XK, (ridge * len(x_XF)).sqrt() * torch.eye(len(kept), dtype=torch.float64)))
    wanted = torch.cat((left_XO, torch.zeros(len(kept), left_XO.shape[1], dtype=torch.float64)))
    change = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution.T
    weight_OK = weight_OF[:, kept] + change
    return weight_OK, y_XO.mean(0) - weight_OK @ mean_K


def share(fit: tuple[Tensor, Tensor], x_XF: Tensor, weight_OF: Tensor, kept: Tensor) -> float:
    y_XO = x_XF @ weight_OF.T
    left_XO = y_XO - x_XF[:, kept] @ fit[0].T - fit[1]
    return float(left_XO.square().sum() / (y_XO - y_XO.mean(0)).square().sum())


@pytest.mark.parametrize("rank", [None, 9])
@pytest.mark.parametrize("count", [13, 30, 4000])
def test_ridge_equals_an_explicit_search(count: int, rank: int | None) -> None:
    """There are fewer tokens than channels, which makes moments singular, or more, or many more."""
    one, other = tokens_of(1, count, 20, rank), tokens_of(2, count + 3, 20, rank)
    layer = torch.randn(6, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    method = method_from_preset("best", mlp_sparsity=0.5, align_hidden=1)
    kept = torch.arange(0, 20, 2)
    errors = {
        strength: 0.5 * share(ridge_fit(one, layer, kept, strength), other, layer, kept)
        + 0.5 * share(ridge_fit(other, layer, kept, strength), one, layer, kept)
        for strength in ridges_from(method.ridge_rel)
    }
    choice = choose_ridge(
        (one, other),
        ridges_from(method.ridge_rel),
        lambda half, strength: ridge_fit(half, layer, kept, strength),
        lambda fit, half: share(fit, half, layer, kept),
    )
    assert choice.strength == min(errors, key=lambda each: errors[each])
    assert choice.share_held_out == pytest.approx(errors[choice.strength], rel=1e-6, abs=1e-12)
    assert choice.strength_whole == pytest.approx(max(choice.strength / 2, 1e-4))


def test_ties_take_the_strongest_ridge() -> None:
    choice = choose_ridge((0, 0), RIDGES, lambda half, strength: strength, lambda fit, half: 1.0)
    assert choice.strength == max(RIDGES)
    assert ridges_from(0.05) == (0.05, 0.1, 0.3, 1.0, 3.0, 10.0)


def test_every_site_uses_the_ridge_its_halves_choose(moments: Moments) -> None:
    dense, name = tiny.checkpoint().model, "blocks.1.attn.v"
    half: dict[str, Any] = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
    method = method_from_preset("best", geometry="square", **half)
    fits = {report.site: report.ridge_fit for report in reduce(dense, moments, method).sites}
    assert {site for site, fit in fits.items() if fit is None} == {"blocks.0.attn.qk", "blocks.1.attn.qk"}
    assert moments.half is not None
    splits, errors = (moments.half, replace(moments_without(moments, moments.half), half=None)), dict[float, float]()
    fit = fits[name]
    assert fit is not None
    for strength in {fit.strength, *ridges_from(method.ridge_rel)[::3]}:
        tried, shares = replace(method, ridge_rel=strength), []
        for own, other in (splits, splits[::-1]):
            (judged,) = (each.held_out for each in reduce(dense, own, tried, widths={name: 24}, held_out=other).sites)
            assert judged is not None
            shares.append(judged.error / judged.energy)
        errors[strength] = sum(shares) / 2
    assert fit.strength == min(errors, key=lambda each: errors[each])
    assert fit.share_held_out == pytest.approx(min(errors.values()))


def test_corp_maps_choose_their_ridge(moments: Moments) -> None:
    dense, method = tiny.checkpoint().model, method_from_preset("corp", attention_sparsity=0.5, align_head=8)
    reduction = reduce(dense, moments, method)
    for report in reduction.sites:
        assert report.ridge_fit is not None
        tried = replace(method, ridge_rel=report.ridge_fit.strength_whole)
        again = reduce(dense, replace(moments, half=None), tried).model
        maps, own = (each.get_parameter(f"{report.site}v.weight")[:48] for each in (reduction.model, again))
        torch.testing.assert_close(maps, own)


@pytest.mark.parametrize("preset", ["corp-v1", "grail"])
def test_published_methods_keep_their_ridge(moments: Moments, preset: str) -> None:
    attention = {} if preset in ("grail", "vbp") else {"attention_sparsity": 0.5, "align_head": 8}
    method = method_from_preset(preset, mlp_sparsity=0.5, align_hidden=8, **attention)
    with_groups = reduce(tiny.checkpoint().model, moments, method)
    without = reduce(tiny.checkpoint().model, replace(moments, half=None), method)
    assert all(report.ridge_fit is None for report in with_groups.sites)
    for one, other in zip(with_groups.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_full_width_is_unchanged(moments: Moments) -> None:
    dense = tiny.checkpoint().model
    widths = {"blocks.0.mlp": 192, "blocks.0.attn.qk": 48, "blocks.0.attn.v": 48}
    method = method_from_preset("best", mlp_sparsity=0.0, attention_sparsity=0.0, align_hidden=8, align_head=8)
    images = torch.from_numpy(tiny.images(4, seed=9))
    got = reduce(dense, moments, method, widths=widths).model
    torch.testing.assert_close(got(images), dense.eval()(images), atol=1e-4, rtol=1e-4)


def test_more_groups_close_the_gap() -> None:
    """Shares follow J (1 -+ s / n), so the shares of half of the groups predict those of all and of more groups."""
    limit, slack, groups = 0.07, 9.0, 37
    fitted, held_out = limit * (1 - slack / (groups / 2)), limit * (1 + slack / (groups / 2))
    gap = estimate_from_splits(fitted, held_out, groups=groups, weights=768)
    assert gap.share_fitted == pytest.approx(limit * (1 - slack / groups))
    assert gap.share_held_out == pytest.approx(limit * (1 + slack / groups))
    assert gap.more_groups is not None
    enough = groups + gap.more_groups
    assert limit * (1 + slack / enough) <= 1.1 * limit * (1 - slack / enough) * 1.001
    assert limit * (1 + slack / (enough - 2)) > 1.1 * limit * (1 - slack / (enough - 2))
    assert gap.tokens_effective == pytest.approx(768 * groups / slack)
    assert estimate_from_splits(0.07, 0.06, groups=9, weights=8).more_groups is None


def test_overfitting_is_reported_with_groups(moments: Moments) -> None:
    gap = estimate_overfitting(tiny.checkpoint().model, moments)
    assert gap is not None
    assert gap.groups == COUNT // CROPS
    assert gap.share_held_out > gap.share_fitted > 0.0
    assert estimate_overfitting(tiny.checkpoint().model, replace(moments, half=None)) is None


@pytest.fixture
def words(tmp_path: Path) -> list[object]:
    """Return the words of `calibrate` with a model, images, an output and groups."""
    save(tiny.checkpoint(), tmp_path / "dense")
    np.save(tmp_path / "images.npy", photographs())
    (tmp_path / "labels.json").write_text(json.dumps([str(each) for each in GROUPS]))
    images = ["--model", tmp_path / "dense", "--images", tmp_path / "images.npy"]
    return ["calibrate", *images, "-o", tmp_path / "m.safetensors", "--groups", tmp_path / "labels.json"]


def test_reduce_and_sweep_report_the_loss_on_the_other_half(words: list[object], tmp_path: Path) -> None:
    """Fits to one half lose more on the other half; each reported share is a quarter of that gap nearer the middle."""
    invoked(*words)
    images = words[3:5]
    words = [*words[1:3], "--moments", tmp_path / "m.safetensors", "--align", "mlp=8,head=8"]
    ran = invoked("reduce", *words, "--mlp", 0.5, "--attn", 0.5, "-o", tmp_path / "reduced", "--json")
    record = json.loads(ran.stdout)
    fits = [site["ridge_fit"] for site in record["sites"] if site["ridge_fit"] is not None]
    fitted, held_out = (np.mean([fit[name] for fit in fits]) for name in ("share_fitted", "share_held_out"))
    assert held_out > fitted > 0.0
    gap = record["data_gap"]
    assert gap["groups"] == COUNT // CROPS
    assert gap["share_fitted"] == pytest.approx(fitted + 0.25 * (held_out - fitted))
    assert gap["share_held_out"] == pytest.approx(held_out - 0.25 * (held_out - fitted))
    shown = invoked("reduce", *words, "--mlp", 0.5, "--attn", 0.5, "-o", tmp_path / "again").output
    lost = f"{gap['share_fitted']:.1%} of their output on these {gap['groups']} groups of images and"
    assert f"at these widths, sites lose {lost}" in " ".join(shown.split())
    swept = invoked("sweep", *words, *images, "--preset", "best", "--sparsity", 0.5, "-o", tmp_path / "sweep").output
    (trial,) = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["trials"]
    assert trial["gap"] == pytest.approx([gap["share_fitted"], gap["share_held_out"]])
    lost = f"sites lose {gap['share_fitted']:.1%} of their output on images of the fit, {gap['share_held_out']:.1%} on"
    assert lost in " ".join(swept.split())


def test_calibrate_finds_groups_and_reduce_sets_them_apart(words: list[object], tmp_path: Path) -> None:
    """Copies of a picture with other values are near-duplicates."""
    once = tiny.images(24, seed=5)
    np.save(tmp_path / "images.npy", np.concatenate([once, 1.01 * once])[np.argsort([*range(24)] * 2, kind="stable")])
    ungrouped = words[: words.index("--groups")]
    said = " ".join(invoked(*ungrouped).output.split())
    assert "24 groups of images belong together by near-duplicates: reduce measures" in said
    moments = load_moments(tmp_path / "m.safetensors")
    assert moments.half is None
    assert moments.group_ids.unique(return_counts=True)[1].tolist() == [2] * 24
    summary = json.loads(invoked(*ungrouped, "--hold-out", 3, "--json").stdout)
    assert summary["groups"] == {"count": 22, "found_by": "near-duplicates"}
    assert load_moments(tmp_path / "m.held-out.safetensors").images == 4
    invoked(*ungrouped, "--groups", "none")
    assert len(load_moments(tmp_path / "m.safetensors").group_ids) == 0


def test_command_accepts_groups(words: list[object], tmp_path: Path) -> None:
    gap = json.loads(invoked(*words, "--hold-out", 3, "--json").stdout)["overfitting"]
    assert gap["groups"] == COUNT // CROPS - 1
    held = load_moments(tmp_path / "m.held-out.safetensors")
    assert (load_moments(tmp_path / "m.safetensors").images, held.images) == (COUNT - CROPS, CROPS)
    refuses("are in no folders", *words[:-1], "folder")
