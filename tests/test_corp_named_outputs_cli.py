"""Backbones with named outputs through the commands: reduced, exported, proven output by output, packaged, released."""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from corp_deploy import load
from corp_deploy.families.family import output_ports, with_outputs
from corp_deploy.traced.models.outputs import outputs_from_text
from export.engine.audit import audit_fusion
from export.engine.options import BatchProfile
from tests import tiny
from tests.command import invoked, refuses
from tests.graphs import needs_rtx
from tests.recipes import recipe

OUTPUTS = ("class", "patches", "block0")


@cache
def done(home: Path) -> Path:
    """Everything up to the graphs, once."""
    tiny.written(home, 64, num_classes=0, reg_tokens=2)
    np.save(home / "held-out.npy", tiny.images(16, seed=5))
    images = ("--images", home / "images.npy")
    invoked("calibrate", "--model", home / "dense", *images, "-o", home / "m.safetensors")
    model = ("--model", home / "dense", "--outputs", ",".join(OUTPUTS), "--moments", home / "m.safetensors", *images)
    result = invoked("reduce", *model, "--mlp", 0.5, "--align", "mlp=8,head=8", "--closed-loop", "-o", home / "reduced")
    behind = "blocks.1.attn.proj, blocks.1.mlp.fc1, blocks.1.mlp.fc2"  # registers of the last block are in no output
    assert f"only places that outputs read count in the fits of {behind}" in " ".join(result.output.split())
    invoked("export", "--model", home / "reduced", "-o", home / "reduced" / "model.onnx", "--precision", "fp32,fp16")
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return done(tmp_path_factory.mktemp("named"))


@pytest.mark.slow("graph")
def test_the_reduced_directory_and_its_graph_give_the_outputs_by_name(home: Path) -> None:
    assert json.loads((home / "reduced" / "config.json").read_text())["outputs"] == list(OUTPUTS)
    session = ort.InferenceSession(str(home / "reduced" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [port.name for port in session.get_outputs()] == list(OUTPUTS)
    for count in (1, 5):
        images = tiny.images(count, seed=count)
        with torch.inference_mode():
            expected = load(home / "reduced")(torch.from_numpy(images))
        got = session.run(None, {"images": images})
        for name, ours, theirs in zip(OUTPUTS, got, expected, strict=True):
            assert np.linalg.norm(ours - theirs.numpy()) < 1e-5 * float(theirs.norm()), name


@pytest.mark.slow("graph")
def test_inspect_says_what_a_model_gives(home: Path) -> None:
    model = ("inspect", "--model", home / "dense", "--outputs", "class,patches")
    assert "outputs of one image: class [48] (embedding), patches [16, 48] (feature map)" in invoked(*model).output
    shown = json.loads(invoked("inspect", "--model", home / "reduced", "--json").stdout)
    assert [each["name"] for each in shown["outputs"]] == list(OUTPUTS)
    assert shown["outputs"][1] == {"name": "patches", "role": "feature map", "shape": [16, 48]}


@pytest.mark.slow("graph")
def test_every_output_is_proven_link_by_link(home: Path) -> None:
    steps = [home / "reduced", home / "reduced" / "model.onnx", home / "reduced" / "model.fp16.onnx"]
    dense = (home / "dense", "--outputs", "block0,class,patches")
    limits = ("--batch", "1,5", "--max-error", 0.5, "--min-agreement", 0.2)
    invoked("verify", *dense, *steps, "--images", home / "held-out.npy", *limits, "-o", home / "parity.json")
    parity = json.loads((home / "parity.json").read_text())
    assert parity["verdict"] == "PASS"
    assert {link["output"] for link in parity["links"]} == set(OUTPUTS)
    assert len(parity["links"]) == 4 * len(OUTPUTS), "reduced, FP32, FP16 and the whole chain, each by output"
    by_name = {link["name"]: link for link in parity["links"]}
    assert "top1_agreement" not in json.dumps(parity)
    tokens = by_name["whole patches"]["measures"]
    assert 0.5 < tokens["token_cosine_q01"] < tokens["token_cosine_mean"] < 1.0
    assert 0.5 < tokens["linear_cka"] < 1.0
    assert tokens["tokens_compared"] == 16 * 16
    assert by_name["whole class"]["measures"]["linear_cka"] > 0.5
    assert all(link["measures"]["relative_error"] < 1e-4 for link in parity["links"] if link["kind"] == "exact")
    rule = ("gate", home / "parity.json", "--fail-if", "token_cosine_q01@whole patches < 0.5", "-o", home / "gate.json")
    invoked(*rule)


@pytest.mark.slow("graph")
def test_other_outputs_than_the_dense_models_are_refused(home: Path) -> None:
    held_out = ("--images", home / "held-out.npy", "-o", home / "other.json")
    refused = invoked("verify", home / "dense", "--outputs", "class", home / "reduced", *held_out, code=2)
    assert "gives class, patches, block0, expected class as the dense model does" in refused.stderr
    refused = invoked("inspect", "--model", home / "reduced", "--outputs", "patches", code=2)
    assert "has outputs of its own: class, patches, block0; drop --outputs patches" in refused.stderr
    refuses("'nose' is none", "inspect", "--model", home / "dense", "--outputs", "class,nose")


@pytest.mark.slow("graph")
def test_a_model_repository_carries_all_outputs(home: Path) -> None:
    invoked("package", home, "-o", home / "repository", "--name", "tiny")
    invoked("package", "lint", home / "repository")
    (config,) = (home / "repository").glob("tiny_cpu/config.pbtxt")
    text = config.read_text()
    for name in OUTPUTS:
        assert f'name: "{name}"' in text
    assert "dims: [ 16, 48 ]" in text.replace("[16, 48]", "[ 16, 48 ]")


RECIPE = recipe(
    {
        "model": {"outputs": ["class", "patches"]},
        "calibration": {"images": "images.npy"},
        "reduce": {"mlp": 0.5, "align_mlp": 8},
        "parity": {"max_error": 0.9},
        "package": {"name": "tiny"},
    }
)


@pytest.mark.slow("graph")
def test_a_recipe_names_outputs_too(home: Path) -> None:
    (home / "recipe.toml").write_text(RECIPE)
    invoked("release", home / "recipe.toml", "-o", home / "release")
    manifest = json.loads((home / "release" / "manifest.json").read_text())
    assert manifest["outputs"] == ["class", "patches"]
    graph = onnx.load(str(home / "release" / "reduced" / "model.onnx"))
    assert [value.name for value in graph.graph.output] == ["class", "patches"]
    invoked("check", home / "release")
    (home / "recipe.toml").write_text(RECIPE.replace('"class", "patches"', '"class", "nose"'))
    assert (
        "[model]: outputs: 'nose' is none" in invoked("release", home / "recipe.toml", "-o", home / "x", code=2).stderr
    )


@pytest.mark.slow("graph", "engine")
@needs_rtx
def test_an_engine_has_the_outputs_and_its_attention_stays_fused(home: Path) -> None:
    invoked(
        *("export", "--model", home / "dense", "--outputs", ",".join(OUTPUTS), "-o", home / "d.onnx"),
        *("--precision", "fp16"),
    )
    batch = BatchProfile(smallest=1, tuned=4, largest=8)
    (audit,) = audit_fusion(home / "d.onnx", home / "reduced" / "model.fp16.onnx", batch=batch)
    assert audit.passed
    assert not audit.lost
    assert len(audit.reduced.fusion.fused_sites) == 2


# Limits and sweeps of models with several outputs: what is said is of the worst one, and each is listed.

NAMES = ("class", "block0")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bare = tiny.written(tmp_path_factory.mktemp("within"), 48, num_classes=0)
    np.save(bare / "held-out.npy", tiny.images(24, seed=5))
    images = ("--images", bare / "images.npy", "-o", bare / "m.safetensors")
    invoked("calibrate", "--model", bare / "dense", *images)
    return bare


def dense(bare: Path) -> tuple[Any, ...]:
    return ("--model", bare / "dense", "--outputs", ",".join(NAMES), "--moments", bare / "m.safetensors")


def errors(bare: Path, directory: Path) -> dict[str, float]:
    """Of each output on the held-out images, by hand."""
    images = torch.from_numpy(np.load(bare / "held-out.npy"))
    exact = with_outputs(load(bare / "dense"), outputs_from_text(",".join(NAMES)))
    reduced: nn.Module = load(directory)
    assert [port.name for port in output_ports(reduced)] == list(NAMES)
    with torch.inference_mode():
        pairs = zip(NAMES, reduced(images), exact(images), strict=True)
        return {name: float((new - old).double().norm() / old.double().norm()) for name, new, old in pairs}


@pytest.mark.slow("models")
def test_the_smallest_model_keeps_the_limit_at_its_worst_output(bare: Path) -> None:
    asked = ("--within", "error 0.3", "--judge", bare / "held-out.npy", "--align", "mlp=8,head=8")
    result = invoked("reduce", *dense(bare), "--images", bare / "images.npy", *asked, "--json", "-o", bare / "within")
    within = json.loads(result.stdout)["within"]
    by_hand = errors(bare, bare / "within")
    answer = min((trial for trial in within["trials"] if trial["holds"]), key=lambda trial: trial["share"])
    worst = max(by_hand, key=by_hand.__getitem__)
    assert by_hand[worst] <= 0.3
    assert answer["judged"]["output"] == worst
    assert answer["judged"]["value"] == pytest.approx(by_hand[worst], rel=1e-4)
    each = answer["judged"]["outputs"]
    assert {name: judged["value"] for name, judged in each.items()} == pytest.approx(by_hand, rel=1e-4)
    failing = [trial["judged"] for trial in within["trials"] if not trial["holds"]]
    assert failing
    assert all(judged["value"] == max(one["value"] for one in judged["outputs"].values()) > 0.3 for judged in failing)
    other = next(name for name in NAMES if name != worst)
    out = invoked("reduce", *dense(bare), "--images", bare / "images.npy", *asked, "-o", bare / "within").output
    assert f"at {worst}, the worst output ({other} {by_hand[other]:.3g})" in " ".join(out.split())


def test_accuracy_is_not_of_tokens(bare: Path) -> None:
    asked = ("--within", "accuracy -1", "--judge", bare / "held-out.npy", "-o", bare / "no")
    refused = invoked("reduce", *dense(bare), "--images", bare / "images.npy", *asked, code=2)
    assert "class is embedding, block0 is feature map, which no label is of" in refused.stderr


def test_a_sweep_says_the_worst_output_and_lists_each(bare: Path) -> None:
    more = ("--images", bare / "held-out.npy", "--align", "mlp=8,head=8", "--min-agreement", 0.01)
    swept = ("--sparsity", "0.1,0.5", "--preset", "best", *more, "-o", bare / "sweep")
    result = invoked("sweep", *dense(bare), *swept)
    trials = json.loads((bare / "sweep" / "sweep.json").read_text())["trials"]
    for trial, sparsity in zip(trials, (0.1, 0.5), strict=True):
        half = ("--mlp", sparsity, "--attn", sparsity, "--align", "mlp=8,head=8", "-o", bare / "half")
        invoked("reduce", *dense(bare), *half)
        by_hand = errors(bare, bare / "half")
        assert {each["name"]: each["relative_error"] for each in trial["outputs"]} == pytest.approx(by_hand, rel=1e-3)
        assert trial["relative_error"] == max(each["relative_error"] for each in trial["outputs"])
        assert trial["agreement"] == min(each["agreement"] for each in trial["outputs"])
    said = " ".join(result.output.split())
    assert "of the worst output" in said or "no model tried errs" in said
    first = trials[0]["outputs"]
    assert f"({first[0]['name']} {first[0]['relative_error']:.4f}, {first[1]['name']}" in said
    with (bare / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["relative_error block0"]) for row in rows] == [t["outputs"][1]["relative_error"] for t in trials]
