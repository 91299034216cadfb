"""Whole heads out of models: planted copies, presets, held-out moments, directories, commands, graphs and engines."""

import importlib.util
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from calib.store import save_moments
from corp_deploy.algebra import whole_heads
from corp_deploy.algebra.block_obs import eliminate_blocks
from corp_deploy.algebra.fold import averages
from corp_deploy.algebra.scores import selection
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.method_choice import RIDGE_OF_BEST
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.traced.models.steps import SegmentStep
from export.engine.audit import audit_fusion
from tests import tiny
from tests.command import invoked, refuses, run
from tests.small_models import error, outputs
from tests.test_corp_rotation import moments

HELD_OUT = torch.from_numpy(tiny.images(6, seed=5))


@torch.no_grad()
def planted() -> Checkpoint:
    """Four heads, the last two copies of the first two."""
    dense = tiny.checkpoint(num_heads=4)
    for name, rows in dense.model.named_parameters():
        if "attn.qkv" in name:
            own = rows.view(3, 4, 12, -1)
            own[:, 2:] = own[:, :2]
    return dense


def test_presets_rank_in_the_expected_order() -> None:
    dense = tiny.checkpoint().model
    share = {"heads_sparsity": 1 / 3}
    errors = {
        name: error(reduce(dense, moments(), method_from_preset(name, **share)).model, dense, HELD_OUT)
        for name in ("best", "grail", "none")
    }
    assert errors["best"] < errors["grail"] < errors["none"]
    both = method_from_preset("best", **share, attention_sparsity=0.5, align_head=8, geometry="square")
    reduction = reduce(dense, moments(), both)
    told = [(each.part, each.width_dense, each.width) for each in reduction.sites if each.site.startswith("blocks.0")]
    assert sorted(told) == [("heads", 3, 2), ("qk", 16, 8), ("v", 16, 8)]
    assert uniform_widths(dense, both)["blocks.0.attn.v"] == 2 * 8
    widths = {site.name: site.width for site in sites_of(reduction.model).every if "attn" in site.name}
    assert set(widths.values()) == {2 * 8}
    assert reduction.coverage.verdict == "4 of 4 sites reduced"
    least = reduce(dense, moments(), method_from_preset("best", heads_sparsity=0.99)).model
    assert {site.width for site in sites_of(least).every if "attn" in site.name} == {16}


def test_held_out_moments_judge_heads(tmp_path: Path) -> None:
    """What is said to be lost is what the stream behind the attention loses on those images."""
    dense, images = tiny.checkpoint(), tiny.images(16, seed=9)
    other = calibrate(dense, tiny.opened(tmp_path / "o.npy", images, dense.model), batch_size=16)
    asked = method_from_preset("best", heads_sparsity=1 / 3)
    reduction = reduce(dense.model, moments(), asked, widths={"blocks.0.attn.v": 32}, held_out=other)
    streams = []
    for model in (dense.model, reduction.model):
        x_BNC = traced_model.first_stream(model, torch.from_numpy(images))
        with torch.inference_mode():
            for step in list(traced_model.steps(model))[:2]:
                assert isinstance(step, SegmentStep)
                x_BNC = step(x_BNC)
        streams.append(x_BNC.double())
    (report,) = reduction.sites
    assert (report.part, report.width) == ("heads", 2)
    assert report.held_out is not None
    lost = float((streams[0] - streams[1]).square().sum(-1).mean())
    assert report.held_out.error == pytest.approx(lost, rel=1e-4)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense directory, its moments and images."""
    home = tmp_path_factory.mktemp("heads")
    save(tiny.checkpoint(), home / "dense")
    save_moments(moments(), home / "moments.safetensors")
    np.save(home / "images.npy", tiny.images(48))
    return home


def reduce_words(home: Path, name: str, *more: object) -> tuple[object, ...]:
    given = ("--model", home / "dense", "--moments", home / "moments.safetensors", "-o", home / name)
    return ("reduce", *given, *more)


@pytest.mark.slow("models")
def test_command_removes_heads(home: Path) -> None:
    words = ("--whole-heads", "0.34", "--mlp", "0.3", "--align", "mlp=8,head=8", "--select", "heads=magnitude")
    record = json.loads(invoked(*reduce_words(home, "reduced", *words, "--json")).stdout)
    assert [site["part"] for site in record["sites"]].count("heads") == 2
    config = json.loads((home / "reduced" / "config.json").read_text())
    assert [len(config["sites"][f"blocks.0.attn.{part}"]["kept"]) for part in ("qk", "v")] == [32, 32]
    removed = {"heads_sparsity": 0.34, "mlp_sparsity": 0.3, "heads_selection": "magnitude", "ridge_rel": RIDGE_OF_BEST}
    asked = method_from_preset("best", **removed, align_hidden=8, align_head=8)
    expected = reduce(tiny.checkpoint().model, moments(), asked).model
    loaded = load_checkpoint(home / "reduced").model
    assert torch.equal(outputs(loaded, HELD_OUT), outputs(expected, HELD_OUT))
    assert "heads" in invoked(*reduce_words(home, "shown", *words)).stdout
    pixels = ("--images", home / "images.npy")
    invoked("calibrate", "--model", home / "reduced", *pixels, "-o", home / "m.safetensors")
    given = ("--model", home / "reduced", "--moments", home / "m.safetensors", *pixels)
    invoked("reduce", *given, "--macs", "0.9", "--align", "mlp=8,head=8", "-o", home / "budget")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--whole-heads", "1"), "--whole-heads"),
        (("--whole-heads", "0.1"), "whole heads 1"),
        (("--whole-heads", "0.5", "--macs", "0.6"), "--macs chooses widths of all heads"),
        (("--whole-heads", "0.5", "--within", "error 0.1"), "--within chooses widths of all heads"),
        (("--whole-heads", "0.5", "--attn", "0.5", "--heads", "auto"), "--heads auto chooses widths of all heads"),
        (("--whole-heads", "0.5", "--preset", "vbp"), "has no effect on preset vbp"),
        (
            ("--whole-heads", "0.5", "--select", "heads=wanda"),
            "heads='wanda': expected one of obs, grail, magnitude, fold",
        ),
        (("--whole-heads", "0.5", "--select", "heads=fold"), "give them with --images"),
        (("--whole-heads", "0.5", "--select", "heads=fold", "--attn", "0.5"), "leave --attn out"),
        (
            ("--mlp", "0.5", "--select", "heads=obs"),
            "heads=obs has no effect on sites that are not reduced; give --whole-heads",
        ),
    ],
)
def test_meaningless_options_are_refused(home: Path, more: tuple[str, ...], message: str) -> None:
    refuses(message, *reduce_words(home, "refused", *more))


def test_whole_heads_are_ranked_on_request() -> None:
    method = ReduceOptions(whole_heads=0.5, select={"heads": "grail"}).method
    assert (method.heads_sparsity, method.heads_selection) == (0.5, "grail")


def test_polish_fits_attentions_with_fewer_heads(home: Path) -> None:
    """Though the heads that are left are as wide as before."""
    words = ("--whole-heads", "0.34", "--images", home / "images.npy", "--polish", "layer", "--polish-steps", "2")
    polish = json.loads(invoked(*reduce_words(home, "polished", *words, "--json")).stdout)["polish"]
    assert {part["part"].split(".attn")[0] for part in polish["parts"]} == {"blocks.0", "blocks.1"}
    assert polish["error"] <= polish["error_before"]


@pytest.mark.slow("graph", "engine")
def test_graphs_and_engines_with_fewer_heads_are_correct(home: Path) -> None:
    """The graph gives torch's outputs; attention stays fused in a plan no larger, but of a single head."""
    invoked(*reduce_words(home, "small", "--whole-heads", "0.34"))
    for name in ("dense", "small"):
        invoked("export", "--model", home / name, "--precision", "fp32,fp16", "-o", home / f"{name}.onnx")
    session = ort.InferenceSession(home / "small.onnx", providers=["CPUExecutionProvider"])
    exact = outputs(load_checkpoint(home / "small").model, HELD_OUT).numpy()
    (got,) = session.run(None, {"images": HELD_OUT.numpy()})
    assert np.linalg.norm(got - exact) < 1e-5 * np.linalg.norm(exact)
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt-rtx is not installed (pip install tensorrt-rtx), so no engine can be built here")
    (audit,) = audit_fusion(home / "dense.fp16.onnx", home / "small.fp16.onnx")
    assert audit.passed
    assert audit.reduced.fused_attention_sites == ("blocks.0.attn", "blocks.1.attn")
    assert audit.reduced.plan_bytes <= audit.dense.plan_bytes
    alone = run(*reduce_words(home, "alone", "--whole-heads", "0.9"))
    assert "a single head left loses the fused attention" in " ".join(alone.stderr.split())
    run("export", "--model", home / "alone", "--precision", "fp16", "-o", home / "alone.fp16.onnx")
    (audit,) = audit_fusion(home / "dense.fp16.onnx", home / "alone.fp16.onnx")
    assert audit.lost == ("blocks.0.attn", "blocks.1.attn")


# Whole heads: scores and orders against loops and brute force, projections against least squares over samples.

HEADS, WIDTH, OUTPUTS = 4, 3, 5
KINDS = ("random", "ill-conditioned", "singular")


def samples(kind: str, heads: int = HEADS, count: int = 400) -> Tensor:
    """z [X, C] with a mean, its heads correlated."""
    generator = torch.Generator().manual_seed(7)
    width = heads * WIDTH
    z_XC = torch.randn(count, width, generator=generator, dtype=torch.float64)
    z_XC = z_XC @ torch.randn(width, width, generator=generator, dtype=torch.float64) + 2.0
    if kind == "ill-conditioned":
        z_XC = z_XC * 10.0 ** (-6.0 * torch.arange(width, dtype=torch.float64) / width)
    elif kind == "singular":
        z_XC[:, -WIDTH:] = z_XC[:, :WIDTH]
        z_XC[:, WIDTH] = 0.5
    return z_XC


def projection(heads: int = HEADS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(OUTPUTS, heads * WIDTH, generator=generator, dtype=torch.float64)
    return weight, torch.randn(OUTPUTS, generator=generator, dtype=torch.float64)


def moments_of(z_XC: Tensor) -> tuple[Tensor, Tensor]:
    return z_XC.mean(0), z_XC.T @ z_XC / len(z_XC)


def fewer(z_XC: Tensor, map_MH: Tensor) -> Tensor:
    """What heads picked or averaged give, head by head."""
    by_head = z_XC.view(len(z_XC), -1, WIDTH)
    return torch.cat([sum(share * by_head[:, head] for head, share in enumerate(row)) for row in map_MH.tolist()], 1)


MAPS = {
    "picked": selection(torch.tensor([0, 2]), HEADS),
    "averaged": averages(torch.tensor([0, 1, 0, 1]), 2),
    "whole groups": torch.block_diag(torch.eye(2, dtype=torch.float64), torch.zeros(0, 2, dtype=torch.float64)),
    "of each group": torch.block_diag(*[torch.full((1, 2), 0.5, dtype=torch.float64)] * 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAPS)
def test_affine_projection_is_least_squares_over_the_samples(name: str, kind: str) -> None:
    """With almost no ridge: the residual of lstsq with a constant beside the heads that are left."""
    z_XC, (weight, bias) = samples(kind), projection()
    got = whole_heads.recover_projection(*moments_of(z_XC), weight, bias, MAPS[name], "affine", ridge_rel=1e-13)
    y_XO, small_XK = z_XC @ weight.T + bias, fewer(z_XC, MAPS[name])
    with_one = torch.cat((small_XK, torch.ones(len(z_XC), 1, dtype=torch.float64)), 1)
    exact = with_one @ torch.linalg.lstsq(with_one, y_XO, driver="gelsd").solution
    best = float((exact - y_XO).square().sum(1).mean())
    found = float((small_XK @ got.weight_OK.T + got.bias_O - y_XO).square().sum(1).mean())
    scale = float(y_XO.square().sum(1).mean())
    assert found == pytest.approx(best, rel=1e-5, abs=1e-7 * scale)
    assert got.residual == pytest.approx(found, rel=1e-6, abs=1e-8 * scale)
    if kind == "random":
        torch.testing.assert_close(small_XK @ got.weight_OK.T + got.bias_O, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAPS)
def test_grail_projection_is_ridge_regression_over_the_samples(name: str, kind: str) -> None:
    """Its equation as published, by stacked rows: roots of the ridge below the samples."""
    z_XC, (weight, bias) = samples(kind), projection()
    got = whole_heads.recover_projection(*moments_of(z_XC), weight, bias, MAPS[name], "gram", ridge_rel=1e-2)
    small_XK = fewer(z_XC, MAPS[name])
    ridge = 1e-2 * float(small_XK.square().mean())
    root = (ridge * len(z_XC)) ** 0.5 * torch.eye(small_XK.shape[1], dtype=torch.float64)
    target = torch.cat((z_XC @ weight.T, torch.zeros(len(root), OUTPUTS, dtype=torch.float64)))
    exact = torch.linalg.lstsq(torch.cat((small_XK, root)), target).solution
    torch.testing.assert_close(got.weight_OK, exact.T, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(got.bias_O, bias)
    assert got.ridge == pytest.approx(ridge)
    found = float((small_XK @ got.weight_OK.T - z_XC @ weight.T).square().sum(1).mean())
    assert got.residual == pytest.approx(found, rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_all_heads_keeps_the_projection(kind: str) -> None:
    z_XC, (weight, bias) = samples(kind), projection()
    whole = selection(torch.arange(HEADS), HEADS)
    for form in ("none", "affine"):
        got = whole_heads.recover_projection(*moments_of(z_XC), weight, bias, whole, form, ridge_rel=1e-2)
        torch.testing.assert_close(got.weight_OK, weight, rtol=0.0, atol=0.0)
        torch.testing.assert_close(got.bias_O, bias, rtol=0.0, atol=0.0)
        assert (got.residual, got.residual_uncompensated, got.r2) == (0.0, 0.0, 1.0)


def test_unfitted_merge_sums_the_columns_of_a_cluster() -> None:
    z_XC, (weight, _) = samples("random"), projection()
    got = whole_heads.recover_projection(*moments_of(z_XC), weight, None, MAPS["averaged"], "none", ridge_rel=1e-4)
    by_head = weight.view(OUTPUTS, HEADS, WIDTH)
    expected = torch.cat((by_head[:, 0] + by_head[:, 2], by_head[:, 1] + by_head[:, 3]), 1)
    torch.testing.assert_close(got.weight_OK, expected)
    found = (fewer(z_XC, MAPS["averaged"]) @ expected.T - z_XC @ weight.T).square().sum(1).mean()
    assert got.residual == pytest.approx(float(found), rel=1e-9)
    assert got.residual == pytest.approx(got.residual_uncompensated, rel=1e-12)


def lost_without(z_XC: Tensor, weight: Tensor, kept: tuple[int, ...]) -> float:
    """The least that any refit over these heads loses."""
    map_MH = selection(torch.tensor(kept), weight.shape[1] // WIDTH)
    centred = z_XC - z_XC.mean(0)
    small, y = fewer(centred, map_MH), centred @ weight.T
    return float((small @ torch.linalg.lstsq(small, y, driver="gelsd").solution - y).square().sum(1).mean())


@pytest.mark.parametrize("kind", ["random", "singular"])
def test_each_elimination_is_the_cheapest_one(kind: str) -> None:
    """By a refit for every candidate; the first is the best set of all but one, too."""
    z_XC, (weight, _) = samples(kind), projection()
    mean, second = moments_of(z_XC)
    found = eliminate_blocks(second - torch.outer(mean, mean), weight, WIDTH, ridge_rel=1e-11)
    left = tuple(range(HEADS))
    for pick, lost in zip(found.order_F.tolist()[:-1], found.error_F.tolist(), strict=False):
        costs = {head: lost_without(z_XC, weight, tuple(each for each in left if each != head)) for head in left}
        assert costs[pick] <= min(costs.values()) * (1.0 + 1e-6) + 1e-7
        left = tuple(each for each in left if each != pick)
        assert lost == pytest.approx(costs[pick], rel=1e-4, abs=1e-6)
    best = min(combinations(range(HEADS), HEADS - 1), key=lambda kept: lost_without(z_XC, weight, kept))
    if kind == "random":
        assert {int(found.order_F[0])} == {*range(HEADS)} - {*best}


def test_scores_equal_those_of_single_heads() -> None:
    z_XC, (weight, _) = samples("random"), projection()
    _, second = moments_of(z_XC)
    energy = whole_heads.output_energy(second, weight, HEADS)
    size = whole_heads.weight_energy(weight, HEADS)
    for head in range(HEADS):
        own = slice(head * WIDTH, (head + 1) * WIDTH)
        alone = (z_XC[:, own] @ weight[:, own].T).square().sum(1).mean()
        assert float(energy[head]) == pytest.approx(float(alone), rel=1e-10)
        assert float(size[head]) == pytest.approx(float(weight[:, own].square().sum()))
