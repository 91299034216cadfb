"""Whole heads out of models: planted copies, presets, held-out moments, directories, commands, graphs and engines."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from click.testing import Result

from calib.store import save as save_moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.release.recipe_tables import ReduceTable
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.traced.models.steps import SegmentStep
from export.engine.audit import audit_fusion
from export.engine.options import BatchProfile
from ground.errors import BadInput
from tests import tiny
from tests.command import invoked, run
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


def test_presets_order_as_they_should_and_narrower_heads_follow() -> None:
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
        x_BNC = traced_model.embedded(model, torch.from_numpy(images))
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


def reduced_by(home: Path, name: str, *more: object) -> Result:
    given = ("--model", home / "dense", "--moments", home / "moments.safetensors", "-o", home / name)
    return run("reduce", *given, *more)


@pytest.mark.slow("models")
def test_the_command_takes_heads_away(home: Path) -> None:
    words = ("--whole-heads", "0.34", "--mlp", "0.3", "--align", "mlp=8,head=8", "--select", "heads=magnitude")
    done = reduced_by(home, "reduced", *words, "--json")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert [site["part"] for site in record["sites"]].count("heads") == 2
    config = json.loads((home / "reduced" / "config.json").read_text())
    assert [len(config["sites"][f"blocks.0.attn.{part}"]["kept"]) for part in ("qk", "v")] == [32, 32]
    asked = method_from_preset(
        "best", heads_sparsity=0.34, mlp_sparsity=0.3, align_hidden=8, align_head=8, heads_selection="magnitude"
    )
    expected = reduce(tiny.checkpoint().model, moments(), asked).model
    loaded = load_checkpoint(home / "reduced").model
    assert torch.equal(outputs(loaded, HELD_OUT), outputs(expected, HELD_OUT))
    shown = reduced_by(home, "shown", *words)
    assert "heads" in shown.stdout
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
        (("--whole-heads", "0.5", "--preset", "vbp"), "is not honoured by preset vbp"),
        (
            ("--whole-heads", "0.5", "--select", "heads=wanda"),
            "heads='wanda': expected one of obs, grail, magnitude, fold",
        ),
        (("--whole-heads", "0.5", "--select", "heads=fold"), "give them with --images"),
        (("--whole-heads", "0.5", "--select", "heads=fold", "--attn", "0.5"), "leave --attn out"),
        (("--mlp", "0.5", "--select", "heads=obs"), "heads=obs is of what stays as it is; give --whole-heads"),
    ],
)
def test_what_makes_no_sense_is_refused(home: Path, more: tuple[str, ...], message: str) -> None:
    result = reduced_by(home, "refused", *more)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split()), result.stderr


def test_a_recipe_asks_for_whole_heads() -> None:
    method = ReduceTable(whole_heads=0.5, select_heads="grail").choice.method
    assert (method.heads_sparsity, method.heads_selection) == (0.5, "grail")
    with pytest.raises(BadInput, match="budget"):
        ReduceTable(whole_heads=0.5, macs=0.5)
    with pytest.raises(BadInput, match="is not honoured by preset vbp"):
        ReduceTable(preset="vbp", whole_heads=0.5)
    assert ReduceOptions.from_options({"whole_heads": 0.5}).method.heads_sparsity == 0.5


@pytest.mark.parametrize("how", ["layer", "block"])
def test_a_polish_fits_attentions_of_fewer_heads(home: Path, how: str) -> None:
    """Though the heads that are left are as wide as before."""
    words = ("--whole-heads", "0.34", "--images", home / "images.npy", "--polish", how, "--polish-steps", "2")
    done = reduced_by(home, how, *words, "--json")
    assert done.exit_code == 0, done.stderr
    polish = json.loads(done.stdout)["polish"]
    assert {part["part"].split(".attn")[0] for part in polish["parts"]} == {"blocks.0", "blocks.1"}
    assert polish["error"] <= polish["error_before"]


@pytest.mark.slow("graph", "engine")
def test_graphs_and_engines_of_fewer_heads(home: Path) -> None:
    """The graph gives torch's outputs; attention stays fused in a plan no larger, but of a single head."""
    assert reduced_by(home, "small", "--whole-heads", "0.34").exit_code == 0
    for name in ("dense", "small"):
        invoked("export", "--model", home / name, "--precision", "fp32,fp16", "-o", home / f"{name}.onnx")
    session = ort.InferenceSession(home / "small.onnx", providers=["CPUExecutionProvider"])
    exact = outputs(load_checkpoint(home / "small").model, HELD_OUT).numpy()
    (got,) = session.run(None, {"images": HELD_OUT.numpy()})
    assert np.linalg.norm(got - exact) < 1e-5 * np.linalg.norm(exact)
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt-rtx is not installed (pip install tensorrt-rtx), so no engine can be built here")
    batch = BatchProfile(smallest=1, tuned=4, largest=8)
    (audit,) = audit_fusion(home / "dense.fp16.onnx", home / "small.fp16.onnx", batch=batch)
    assert audit.passed
    assert audit.reduced.fusion.fused_sites == ("blocks.0.attn", "blocks.1.attn")
    assert audit.reduced.plan_bytes <= audit.dense.plan_bytes
    alone = reduced_by(home, "alone", "--whole-heads", "0.9")
    assert "a single head left loses the fused attention" in " ".join(alone.stderr.split())
    run("export", "--model", home / "alone", "--precision", "fp16", "-o", home / "alone.fp16.onnx")
    (audit,) = audit_fusion(home / "dense.fp16.onnx", home / "alone.fp16.onnx", batch=batch)
    assert audit.lost == ("blocks.0.attn", "blocks.1.attn")
