"""Models without a family of their own are calibrated, reduced, saved, loaded, exported and verified."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, site_costs
from corp_deploy.families.family import input_ports, sites_of
from corp_deploy.families.timm_library import NORMS
from corp_deploy.polish.polish import reason_against
from corp_deploy.polish.walk import blocks
from corp_deploy.proof.locate import graph_of_checkpoint
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.spec.trusted_code import trusting_code
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.traced.finding.site_groups import Index
from corp_deploy.traced.models.module import traced_state
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.traced.models.steps import SegmentStep
from corp_deploy.traced.programs.exported import Norm
from export.graph.precision import typed_copy
from perf.parity.block_outputs import locate_in_exact
from tests.command import invoked, refuses
from tests.refusals import rejects
from tests.traced_examples import DENSENET, PVT, checkpoint_of, images, with_structure, written_by

ALIGNED: Mapping[str, Any] = {"align_hidden": 4, "align_head": 4, "align_conv": 4}
HALF: Mapping[str, Any] = {"mlp_sparsity": 0.5, "conv_sparsity": 0.5, **ALIGNED}


def own_checkpoint(**arguments: int) -> Checkpoint:
    own = written_by("tests.traced_examples.Patched", **arguments)
    with_structure(own.model)
    return own


def checkpoint_named(name: str) -> Checkpoint:
    if name == "own":
        return own_checkpoint()
    return checkpoint_of({"pvt": PVT, "densenet": DENSENET}[name])


def calibrated(checkpoint: Checkpoint, home: Path) -> Moments:
    np.save(home / "calibration.npy", images(64, seed=1))
    opened = images_for_model(checkpoint.model, home / "calibration.npy")
    return calibrate(checkpoint, opened, batch_size=16)


def kept_of(model: nn.Module) -> Mapping[str, Index]:
    """Return the kept groups of each site, numbered as in the dense program."""
    cut = traced_state(model).cut
    assert cut is not None
    return cut.kept


def apart(model: nn.Module, dense: nn.Module) -> float:
    """Return the relative error of the outputs on images that calibration didn't use."""
    with torch.inference_mode():
        given, expected = (each(torch.from_numpy(images(24, seed=2))) for each in (model, dense))
    return float((given - expected).norm() / expected.norm())


def assert_saved_is_loaded(dense: Checkpoint, reduction: Reduction, home: Path) -> None:
    """Assert that a saved reduction is loaded with equal outputs and widths."""
    written = Checkpoint(model=reduction.model, architecture=dense.architecture, lineage={})
    save(written, home / "reduced")
    with trusting_code(True):
        loaded = load_checkpoint(home / "reduced").model
    pixels = torch.from_numpy(images(3, seed=3))
    with torch.inference_mode():
        assert torch.equal(loaded(pixels), reduction.model(pixels))
    widths, again = ([(site.name, site.width) for site in sites_of(each).every] for each in (reduction.model, loaded))
    assert widths == again


@torch.no_grad()
def with_repeated_heads(model: nn.Module, shared: int) -> nn.Module:
    """Make the last two of four heads copies of the first two."""
    for name in ("h.0.attn.c_attn", "h.1.attn.c_attn"):
        for parameter in (model.get_parameter(f"{name}.weight"), model.get_parameter(f"{name}.bias")):
            for rows in parameter.split((48, 48 // shared, 48 // shared)):
                rows[len(rows) // 2 :] = rows[: len(rows) // 2].clone()
    return model


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", ["own", "densenet"])
def test_steps_compose_to_the_model_and_survive_narrowing(name: str, tmp_path: Path) -> None:
    dense = checkpoint_named(name)
    reduced = reduce(dense.model, calibrated(dense, tmp_path), method_from_preset("none", **HALF)).model
    pixels = torch.from_numpy(images(3, seed=3))
    for model in (dense.model, reduced):
        stream_BNC = traced_model.first_stream(model, pixels)
        for step in traced_model.steps(model):
            assert isinstance(step, SegmentStep), step
            stream_BNC = step(stream_BNC)
            assert stream_BNC.ndim == 3
        assert torch.allclose(traced_model.output_of_stream(model, stream_BNC, pixels), model(pixels), atol=1e-5)
    assert [block.name for block in blocks(dense.model)] == [block.name for block in blocks(reduced)]


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", ["own", "densenet"])
def test_convolutional_models_are_not_polished(name: str, tmp_path: Path) -> None:
    dense = checkpoint_named(name)
    start = reduce(dense.model, calibrated(dense, tmp_path), method_from_preset("none", **HALF)).model
    reason = reason_against(dense.model, start)
    assert reason is not None
    assert "have convolutions with kernels larger than 1x1, which polish can't fit; leave --polish out" in reason


@pytest.mark.slow("graph")
def test_narrowed_graph_is_named_by_modules_and_its_bad_block_found(tmp_path: Path) -> None:
    dense = own_checkpoint()
    reduced = reduce(dense.model, calibrated(dense, tmp_path), method_from_preset("none", **HALF)).model
    model, pixels = traced_model.exportable(reduced), images(4, seed=3)
    assert torch.equal(model(torch.from_numpy(pixels)), reduced(torch.from_numpy(pixels)))
    assert model.state_dict().keys() == reduced.state_dict().keys()
    assert [name for name, module in model.named_modules() if isinstance(module, Norm)][:2] == ["h.0.ln_1", "h.0.ln_2"]
    feeds = {input_ports(reduced)[0].name: pixels}
    own = Checkpoint(model=reduced, architecture=dense.architecture, lineage={})
    assert locate_in_exact("onnx", model, graph_of_checkpoint(own, "fp32"), feeds, products=32).site is None
    spoilt = copy.deepcopy(model)
    with torch.no_grad():
        spoilt.get_parameter("h.1.attn.c_proj.weight").mul_(1.01)
    found = locate_in_exact("onnx", spoilt, graph_of_checkpoint(own, "fp32"), feeds, products=32)
    assert found.site == "h.1.attn", found
    mixed = typed_copy(model, "mixed", ("h.1.*",), norms=NORMS)
    kinds = {name: parameter.dtype for name, parameter in mixed.named_parameters()}
    assert kinds["h.1.c_fc.weight"] == kinds["h.0.ln_1.weight"] == torch.float32
    assert kinds["h.0.c_fc.weight"] == torch.float16
    with torch.inference_mode():
        assert torch.allclose(mixed(torch.from_numpy(pixels)), reduced(torch.from_numpy(pixels)), atol=1e-2)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write weights of a small PVT, calibration images and held-out images."""
    monkeypatch.chdir(tmp_path)
    save_file(checkpoint_of(PVT).model.state_dict(), "weights.safetensors")
    np.save("calibration.npy", images(64, seed=1))
    np.save("held-out.npy", images(16, seed=2))
    return tmp_path


DENSE = ("pvt_v2_b0", "--weights", "weights.safetensors", "--model-kwargs", json.dumps(dict(PVT.kwargs)))


EDITED: Mapping[str, tuple[tuple[str, str], Any, str]] = {
    "of another kind": (
        ("sites", "stages.0.blocks.0.mlp"),
        {"groups": 64, "hidden": 4},
        "unknown key 'hidden'",
    ),
    "of another size": (("sites", "stages.0.blocks.0.attn.v"), {"groups": 8}, "no site"),
    "out of order": (
        ("sites", "stages.0.blocks.0.mlp"),
        {"groups": 64, "kept": [3, 1]},
        "expected rising numbers below 64",
    ),
    "beyond": (("sites", "stages.0.blocks.0.mlp"), {"groups": 64, "kept": [0, 64]}, "expected rising numbers below 64"),
    "a bias": (("program", "biases"), ["elsewhere.bias"], "narrowing adds no bias 'elsewhere.bias'"),
    "of another program": (
        ("program", "digest"),
        "0" * 64,
        r"written with torch 1\.0, timm 0\.1 and gives another program with torch",
    ),
}


@pytest.mark.slow("graph")
def test_absent_sites_and_edited_directories_are_refused(home: Path) -> None:
    invoked("calibrate", "--model", *DENSE, "--images", "calibration.npy", "-o", "m.safetensors", "-q")
    invoked(
        "reduce", "--model", *DENSE, "--moments", "m.safetensors", "--mlp", 0.5, "--align", "mlp=4", "-o", "reduced"
    )
    words = ("reduce", "--model", *DENSE, "--moments", "m.safetensors", "-o", "refused", "--conv", 0.5)
    refuses("a model without channels between convolutions", *words)
    assert not (home / "refused").exists()
    written = (home / "reduced/config.json").read_text()
    for (part, key), value, reason in EDITED.values():
        config = json.loads(written)
        assert config["sites"]["stages.0.blocks.0.mlp"]["groups"] == 64
        config["program"]["versions"] = {"torch": "1.0", "timm": "0.1"}
        config[part][key] = value
        (home / "reduced/config.json").write_text(json.dumps(config))
        rejects(f"config.json: .*{reason}", load_checkpoint, home / "reduced")


JUDGED = ("--images", "calibration.npy", "--held-out", "m.held-out.safetensors")
# By name: options of reduce, and words of the refusal of a contradictory combination.
LEVERS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "held out, in groups": (("--mlp", 0.5, "--attn", 0.25, "--heads", "square", *JUDGED[2:]), ""),
    "within": (("--within", "error 0.5", *JUDGED), ""),
    "parameters": (("--params", 0.8, *JUDGED), ""),
    "rotated": (("--attn", 0.5, "--heads", "square", "--rotate"), ""),
    "sparse alone": (("--sparse", "mlp=2:4", *JUDGED), ""),
    "heads merged": (("--whole-heads", 0.5, "--select", "heads=fold", *JUDGED), ""),
    "sparse unjudged": (("--within", "error 0.5", "--sparse", "2:4", *JUDGED), "would follow unjudged"),
    "all at once": (("--whole-heads", 0.5, "--attn", 0.25, "--mlp", 0.25, "--sparse", "2:4", *JUDGED), ""),
}


@pytest.mark.slow("graph", "measurement")
def test_levers_combine(home: Path) -> None:
    parted = ("--images", "calibration.npy", "--hold-out", 16, "--groups", "image")
    invoked("calibrate", "--model", *DENSE, *parted, "-o", "m.safetensors", "-q")
    given = ("--model", *DENSE, "--moments", "m.safetensors", "--align", "mlp=4,head=4", "-q")
    pixels = torch.from_numpy(images(3, seed=3))
    for name, (asked, reason) in LEVERS.items():
        result = invoked(*("reduce", *given, *asked, "-o", name), code=2 if reason else 0)
        assert reason in " ".join(result.output.split()), name
        assert (home / name).exists() != bool(reason), name
    loaded = load_checkpoint(home / "all at once")
    assert len(loaded.sparsity) == 10
    assert loaded.model(pixels).shape == (3, 7)
    widths = {site.name: site.width for site in sites_of(loaded.model).every}
    assert [widths[f"stages.{stage}.blocks.0.attn.v"] for stage in (0, 1)] == [16, 16]
    for precision in ("bf16", "fp8"):
        more = ("--images", "calibration.npy") if precision == "fp8" else ()
        invoked("export", "--model", "all at once", "--precision", precision, *more, "-o", f"{precision}.onnx", "-q")


def test_every_site_saves_its_counted_macs() -> None:
    """Queries and keys save one of attention's two products, values the other."""
    model = dense_from_architecture(PVT)
    found, costs = sites_of(model).every, site_costs(model, "macs")
    for site in found:
        widths = {site.name: site.width // 2}
        assert costs.saved(found, widths) == macs(model) - macs(at_widths(model, widths)), site.name
