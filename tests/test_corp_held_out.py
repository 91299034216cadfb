"""Sites judged on images that they were not fitted to, against explicit float64 passes over those images."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from calib.images import Images
from calib.inputs import held_out_split
from calib.moments import Moments
from calib.store import load_moments
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.report import SiteReport
from corp_deploy.store.input_sets import images_for_model
from tests import tiny
from tests.command import invoked, run
from tests.refusals import rejects
from tests.test_corp_folded import linear, mlp

FIT, HELD_OUT = 40, 12


def opened(path: Path) -> Images:
    return images_for_model(tiny.checkpoint().model, path)


def taken(path: Path, count: int, seed: int) -> Moments:
    np.save(path, tiny.images(count, seed=seed))
    return calibrate(tiny.checkpoint(), opened(path), batch_size=8, statistics=Statistics(attention_system=True))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Moments, Moments]:
    root = tmp_path_factory.mktemp("moments")
    return taken(root / "fit.npy", FIT, 1), taken(root / "held-out.npy", HELD_OUT, 2)


def heard(model: nn.Module, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into a module of the dense model and what comes out of it, in float64."""
    caught: list[tuple[Tensor, Tensor]] = []
    dense = copy.deepcopy(model).double()
    dense.get_submodule(name).register_forward_hook(lambda _, given, out: caught.append((given[0], out)))
    with torch.inference_mode():
        dense(images.double())
    return caught[0]


def held_out_images() -> Tensor:
    return torch.from_numpy(tiny.images(HELD_OUT, seed=2))


def report(sites: tuple[SiteReport, ...], name: str, part: str) -> SiteReport:
    return next(site for site in sites if (site.site, site.part) == (name, part))


def heads_of(qkv_BNX: Tensor, heads: int, qk: int, v: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B,H,N,qk] and v [B,H,N,v] out of a fused projection."""
    batch, tokens, _ = qkv_BNX.shape
    q, k, value = qkv_BNX.split((heads * qk, heads * qk, heads * v), dim=-1)
    return tuple(each.reshape(batch, tokens, heads, -1).transpose(1, 2) for each in (q, k, value))


@pytest.mark.parametrize("preset", ["best", "vbp", "none"])
def test_mlp_is_judged_on_held_out_images(both: tuple[Moments, Moments], preset: str) -> None:
    dense = tiny.checkpoint().model
    method = method_from_preset(preset, mlp_sparsity=0.5, align_hidden=8)
    found = reduce(dense, both[0], method, held_out=both[1])
    for name in ("blocks.0.mlp", "blocks.1.mlp"):
        given, out = heard(dense, name, held_out_images())
        new = mlp(found.model, name, given)
        site = report(found.sites, name, "mlp")
        assert site.held_out is not None
        rows, wanted = (new - out).flatten(0, 1), out.flatten(0, 1)
        assert site.held_out.error == pytest.approx(float(rows.square().sum(1).mean()), rel=1e-3)
        assert site.held_out.energy == pytest.approx(float((wanted - wanted.mean(0)).square().sum(1).mean()), rel=1e-5)


@pytest.mark.parametrize("preset", ["best", "none", "corp-v1", "corp"])
def test_logits_are_judged_over_all_pairs_of_tokens(both: tuple[Moments, Moments], preset: str) -> None:
    """Those of `corp` image by image."""
    dense = tiny.checkpoint().model
    method = method_from_preset(preset, attention_sparsity=0.5, align_head=8)
    found = reduce(dense, both[0], method, held_out=both[1])
    name, heads = "blocks.1.attn", 3
    given, out = heard(dense, f"{name}.qkv", held_out_images())
    logits = []
    for qkv, width in ((out, 16), (linear(found.model, f"{name}.qkv", given), 8)):
        q, k, _ = heads_of(qkv, heads, width, 16)
        if preset in ("best", "none"):  # softmax ignores what is constant along a row; CORP's equations do not
            k = k - k.mean(dim=2, keepdim=True)
        if preset != "corp":
            q, k = (each.transpose(0, 1).flatten(1, 2) for each in (q, k))
        logits.append(q @ k.mT)
    pairs = 1 if preset == "corp" else logits[0][0].numel()
    site = report(found.sites, f"{name}.qk", "qk")
    assert site.held_out is not None
    assert site.held_out.error == pytest.approx(float((logits[0] - logits[1]).square().sum()) / pairs, rel=1e-3)
    assert site.held_out.energy == pytest.approx(float(logits[0].square().sum()) / pairs, rel=1e-5)


def test_values_are_judged_at_the_projection_output(both: tuple[Moments, Moments]) -> None:
    dense = tiny.checkpoint().model
    method = method_from_preset("best", attention_sparsity=0.5, align_head=8, geometry="square")
    found = reduce(dense, both[0], method, held_out=both[1])
    name, heads = "blocks.1.attn", 3
    given, out = heard(dense, f"{name}.qkv", held_out_images())
    _, wanted = heard(dense, f"{name}.proj", held_out_images())
    q, k, _ = heads_of(out, heads, 16, 16)
    _, _, v = heads_of(linear(found.model, f"{name}.qkv", given), heads, 8, 8)
    mixed = (q @ k.mT * 16**-0.5).softmax(dim=-1) @ v
    new = linear(found.model, f"{name}.proj", mixed.transpose(1, 2).flatten(2))
    site = report(found.sites, f"{name}.v", "v")
    assert site.held_out is not None
    error = float((new - wanted).flatten(0, 1).square().sum(1).mean())
    assert site.held_out.error == pytest.approx(error, rel=1e-3)
    assert site.held_out.error > site.error  # 40 images of noise fit 144 inputs better than others do


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


# Images held out


def test_split_parts_share_no_image_and_keep_the_order(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", tiny.images(30))
    images = opened(tmp_path / "images.npy")
    rest, held_out = held_out_split(images, 9, seed=3)
    assert (rest.count, held_out.count) == (21, 9)
    chosen = [*rest.places, *held_out.places]
    assert sorted(chosen) == list(range(30))
    assert list(held_out.places) == sorted(held_out.places)
    assert list(held_out.places) != list(range(21, 30))  # a sorted folder's last class would be no sample
    assert not torch.isin(rest.ids, held_out.ids).any()
    assert len({images.digest, rest.digest, held_out.digest}) == 3
    assert held_out_split(images, 9, seed=3)[1].digest == held_out.digest
    assert held_out_split(images, 9, seed=4)[1].digest != held_out.digest


def test_copies_of_an_image_stay_in_one_part(tmp_path: Path) -> None:
    """Else a folder with copies would give moments that judge themselves, and be refused."""
    np.save(tmp_path / "images.npy", tiny.images(10)[np.arange(30) % 10])
    images = opened(tmp_path / "images.npy")
    rest, held_out = held_out_split(images, 4, seed=0)
    assert (rest.count, held_out.count) == (18, 12)
    assert not torch.isin(rest.ids, held_out.ids).any()
    said = "got 10 of 30 images, which are copies of 10 different ones, and copies stay on one side: expected 1 to 9"
    rejects(said, held_out_split, images, 10, seed=0)
    for count in (0, 30, 31):
        rejects(f"got {count} of 30 images", held_out_split, images, count, seed=0)


def test_splitting_copies_of_one_image_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", tiny.images(1)[np.zeros(9, int)])
    said = "got 1 of 9 images, which are all copies of one: none can be held out; give different images"
    rejects(said, held_out_split, opened(tmp_path / "images.npy"), 1, seed=0)


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
    of_all, judged, without = (
        (invoked("reduce", *words, *more, "-o", tmp_path / name), load_file(tmp_path / name / "model.safetensors"))[1]
        for name, more in {
            "all": [],
            "judged": ["--held-out", home / "m.held-out.safetensors"],
            "without": ["--hold-out", 6],
        }.items()
    )
    torch.testing.assert_close(judged, without, rtol=0, atol=0)
    assert any(not torch.equal(of_all[name], each) for name, each in judged.items())


def test_overlapping_or_absent_held_out_moments_write_nothing(home: Path, tmp_path: Path) -> None:
    words = ["--model", home / "dense", "--moments", home / "m.safetensors", "--mlp", 0.5, "-o", tmp_path / "r"]
    for judge, said in (
        (home / "m.safetensors", "are calibration images too"),
        (home / "none.safetensors", "none.saf"),
    ):
        result = invoked("reduce", *words, "--held-out", judge, code=2)
        assert said in result.stderr
        assert "Traceback" not in result.stderr
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
