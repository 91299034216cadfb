"""Held-out images: losses of sites on them against float64 passes, and the split that sets them apart."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from calib.inputs import held_out_split
from calib.moments import Moments
from calib.store import load_moments
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.report import SiteReport
from tests import tiny
from tests.command import invoked, refused, run
from tests.doubles import some
from tests.refusals import rejects
from tests.test_corp_folded import linear, mlp

FIT, HELD_OUT = 40, 12


def moments_of(path: Path, count: int, seed: int) -> Moments:
    images = tiny.opened(path, tiny.images(count, seed=seed))
    return calibrate(tiny.checkpoint(), images, batch_size=8, statistics=Statistics(attention_system=True))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Moments, Moments]:
    root = tmp_path_factory.mktemp("moments")
    return moments_of(root / "fit.npy", FIT, 1), moments_of(root / "held-out.npy", HELD_OUT, 2)


def held_out_io(name: str) -> tuple[Tensor, Tensor]:
    """Return the input and the output of a module of the dense model on the held-out images, in float64."""
    images = torch.from_numpy(tiny.images(HELD_OUT, seed=2)).double()
    return tiny.module_io(tiny.checkpoint().model.double(), name, images)


def report(sites: tuple[SiteReport, ...], name: str, part: str) -> SiteReport:
    return next(site for site in sites if (site.site, site.part) == (name, part))


def heads_of(qkv_BNX: Tensor, heads: int, qk: int, v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the output of a fused projection into q, k [B,H,N,qk] and v [B,H,N,v]."""
    batch, tokens, _ = qkv_BNX.shape
    q, k, value = qkv_BNX.split((heads * qk, heads * qk, heads * v), dim=-1)
    return tuple(each.reshape(batch, tokens, heads, -1).transpose(1, 2) for each in (q, k, value))


@pytest.mark.parametrize("preset", ["best", "vbp", "none"])
def test_mlp_is_judged_on_held_out_images(both: tuple[Moments, Moments], preset: str) -> None:
    dense = tiny.checkpoint().model
    method = method_from_preset(preset, mlp_sparsity=0.5, align_hidden=8)
    found = reduce(dense, both[0], method, held_out=both[1])
    for name in ("blocks.0.mlp", "blocks.1.mlp"):
        entering, out = held_out_io(name)
        changes, rows = (each.flatten(0, 1) for each in (mlp(found.model, name, entering) - out, out))
        judged = some(report(found.sites, name, "mlp").held_out)
        assert judged.error == pytest.approx(float(changes.square().sum(1).mean()), rel=1e-3)
        assert judged.energy == pytest.approx(float((rows - rows.mean(0)).square().sum(1).mean()), rel=1e-5)


@pytest.mark.parametrize("preset", ["best", "none", "corp-v1", "corp"])
def test_logits_are_judged_over_all_pairs_of_tokens(both: tuple[Moments, Moments], preset: str) -> None:
    """`corp` sums its logits image by image, the other presets over all tokens of all images."""
    dense = tiny.checkpoint().model
    method = method_from_preset(preset, attention_sparsity=0.5, align_head=8)
    found = reduce(dense, both[0], method, held_out=both[1])
    name, heads = "blocks.1.attn", 3
    entering, out = held_out_io(f"{name}.qkv")
    logits = []
    for qkv, width in ((out, 16), (linear(found.model, f"{name}.qkv", entering), 8)):
        q, k, _ = heads_of(qkv, heads, width, 16)
        if preset in ("best", "none"):  # softmax ignores a constant along a row, CORP's equations don't
            k = k - k.mean(dim=2, keepdim=True)
        if preset != "corp":
            q, k = (each.transpose(0, 1).flatten(1, 2) for each in (q, k))
        logits.append(q @ k.mT)
    pairs = 1 if preset == "corp" else logits[0][0].numel()
    judged = some(report(found.sites, f"{name}.qk", "qk").held_out)
    assert judged.error == pytest.approx(float((logits[0] - logits[1]).square().sum()) / pairs, rel=1e-3)
    assert judged.energy == pytest.approx(float(logits[0].square().sum()) / pairs, rel=1e-5)


def test_values_are_judged_at_the_projection_output(both: tuple[Moments, Moments]) -> None:
    dense = tiny.checkpoint().model
    method = method_from_preset("best", attention_sparsity=0.5, align_head=8, geometry="square")
    found = reduce(dense, both[0], method, held_out=both[1])
    name, heads = "blocks.1.attn", 3
    entering, out = held_out_io(f"{name}.qkv")
    _, expected = held_out_io(f"{name}.proj")
    q, k, _ = heads_of(out, heads, 16, 16)
    _, _, v = heads_of(linear(found.model, f"{name}.qkv", entering), heads, 8, 8)
    mixed = (q @ k.mT * 16**-0.5).softmax(dim=-1) @ v
    new = linear(found.model, f"{name}.proj", mixed.transpose(1, 2).flatten(2))
    site = report(found.sites, f"{name}.v", "v")
    judged = some(site.held_out)
    assert judged.error == pytest.approx(float((new - expected).flatten(0, 1).square().sum(1).mean()), rel=1e-3)
    assert judged.error > site.error  # the site is fitted to 40 images only


def test_unsuitable_held_out_moments_are_refused(both: tuple[Moments, Moments]) -> None:
    dense, (fit, held_out) = tiny.checkpoint().model, both
    method = method_from_preset("best", mlp_sparsity=0.5, align_hidden=8)
    rejects("40 of their 40 images are calibration images too", reduce, dense, fit, method, held_out=fit)
    other = replace(held_out, lineage={**held_out.lineage, "preprocessing": "other"})
    rejects("another preprocessing: theirs is other", reduce, dense, fit, method, held_out=other)
    foreign = replace(held_out, lineage={**held_out.lineage, "model": "other"})
    rejects("taken on another model", reduce, dense, fit, method, held_out=foreign)
    fewer = replace(held_out, sites={name: site for name, site in held_out.sites.items() if name != "blocks.0.mlp.fc2"})
    rejects(r"blocks\.0\.mlp: the moments hold no statistics", reduce, dense, fit, method, held_out=fewer)


# The split of images


def test_split_parts_share_no_image_and_keep_the_order(tmp_path: Path) -> None:
    images = tiny.opened(tmp_path / "images.npy", tiny.images(30))
    rest, held_out = held_out_split(images, 9, seed=3)
    assert (rest.count, held_out.count) == (21, 9)
    chosen = [*rest.places, *held_out.places]
    assert sorted(chosen) == list(range(30))
    assert list(held_out.places) == sorted(held_out.places)
    assert list(held_out.places) != list(range(21, 30))  # the end of a sorted folder would be one class
    assert not torch.isin(rest.ids, held_out.ids).any()
    assert len({images.digest, rest.digest, held_out.digest}) == 3
    assert held_out_split(images, 9, seed=3)[1].digest == held_out.digest
    assert held_out_split(images, 9, seed=4)[1].digest != held_out.digest


def test_copies_of_an_image_stay_in_one_part(tmp_path: Path) -> None:
    """Copies in both parts would give held-out moments that are refused, since they share images with the fit."""
    images = tiny.opened(tmp_path / "images.npy", tiny.images(10)[np.arange(30) % 10])
    rest, held_out = held_out_split(images, 4, seed=0)
    assert (rest.count, held_out.count) == (18, 12)
    assert not torch.isin(rest.ids, held_out.ids).any()
    message = "got 10 of 30 images, which are copies of 10 different ones, and copies stay on one side: expected 1 to 9"
    rejects(message, held_out_split, images, 10, seed=0)
    for count in (0, 30, 31):
        rejects(f"got {count} of 30 images", held_out_split, images, count, seed=0)


def test_splitting_copies_of_one_image_is_refused(tmp_path: Path) -> None:
    images = tiny.opened(tmp_path / "images.npy", tiny.images(1)[np.zeros(9, int)])
    message = "got 1 of 9 images, which are all copies of one: none can be held out; give different images"
    rejects(message, held_out_split, images, 1, seed=0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("home"), 30)
    words = ["--model", root / "dense", "--images", root / "images.npy", "--hold-out", 6, "-o", root / "m.safetensors"]
    result = invoked("calibrate", *words, "--json")
    record = json.loads(result.stdout)
    assert (record["images"], record["held_out"]["images"]) == (24, 6)
    return root


def test_commands_hold_out_images_and_judge_on_them(home: Path, tmp_path: Path) -> None:
    assert load_moments(home / "m.safetensors").images == 24
    held_out = load_moments(home / "m.held-out.safetensors")
    assert held_out.images == 6
    words = ["--model", home / "dense", "--moments", home / "m.safetensors", "--mlp", 0.5, "--attn", 0.5]
    judge = ["--held-out", home / "m.held-out.safetensors", "--align", "mlp=8,head=8"]
    assert "held out" in invoked("reduce", *words, *judge, "-o", tmp_path / "r").stdout
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    sites: list[dict[str, Any]] = config["lineage"]["reduction"]["sites"]
    assert all(site["held_out"]["error"] > 0.0 for site in sites)
    assert config["lineage"]["held_out_images"] == held_out.lineage["images"]
    assert "held out" not in run("reduce", *words, "--align", "mlp=8,head=8", "-o", tmp_path / "s").stdout


def test_sparsification_excludes_the_judging_images(home: Path, tmp_path: Path) -> None:
    words = ["--model", home / "dense", "--moments", home / "m.safetensors", "--mlp", 0.5, "--align", "mlp=16"]
    words += ["--sparse", "2:4", "--images", home / "images.npy"]

    def weights(*more: object) -> dict[str, Tensor]:
        invoked("reduce", *words, *more, "-o", tmp_path / "r")
        return load_file(tmp_path / "r" / "model.safetensors")

    every, judged = weights(), weights("--held-out", home / "m.held-out.safetensors")
    torch.testing.assert_close(judged, weights("--hold-out", 6), rtol=0, atol=0)
    assert any(not torch.equal(every[name], each) for name, each in judged.items())


def test_overlapping_or_absent_held_out_moments_write_nothing(home: Path, tmp_path: Path) -> None:
    words = ["--model", home / "dense", "--moments", home / "m.safetensors", "--mlp", 0.5, "-o", tmp_path / "r"]
    refused(run("reduce", *words, "--held-out", home / "m.safetensors"), "are calibration images too")
    refused(run("reduce", *words, "--held-out", home / "none.safetensors"), "none.saf")
    assert not list(tmp_path.iterdir())


def test_budget_is_compared_with_uniform_widths(home: Path, tmp_path: Path) -> None:
    words = ["--model", home / "dense", "--moments", home / "m.safetensors", "--align", "mlp=16,head=8"]
    result = invoked("reduce", *words, "--macs", 0.7, "--images", home / "images.npy", "-o", tmp_path / "r", "--json")
    by_site, *again, uniform = json.loads(result.stdout)["ways"]
    assert [way["name"] for way in again] in ([], ["by site, allocated again"])
    assert uniform["name"].startswith("uniform sparsity 0.")
    assert by_site["share"] <= 0.7
    assert uniform["share"] <= 0.7
    assert by_site["predicted_error"] <= uniform["predicted_error"]
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert config["lineage"]["reduction"]["ways"] == [by_site, *again, uniform]
    sites = config["lineage"]["reduction"]["sites"]
    assert all(site["width_asked"] == site["width"] for site in sites)
