"""Named outputs in the commands: reduce, export, verify output by output, heads, sweep and release."""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corp_deploy import load
from corp_deploy.families.family import output_ports, with_outputs
from corp_deploy.spec.outputs import outputs_from_text
from export.graph.to_onnx import onnx_from_model, save_onnx
from ground.ports import OutputPort, Port, Role
from tests import tiny
from tests.command import invoked, refuses
from tests.graphs import audited, needs_rtx, session_of
from tests.recipes import recipe

OUTPUTS = ("class", "patches", "block0")


@cache
def reduced_and_exported(home: Path) -> Path:
    """Calibrate, reduce and export a model with three named outputs in a folder, and return the folder."""
    tiny.written(home, 64, num_classes=0, reg_tokens=2)
    np.save(home / "held-out.npy", tiny.images(16, seed=5))
    images = ("--images", home / "images.npy")
    invoked("calibrate", "--model", home / "dense", *images, "-o", home / "m.safetensors")
    model = ("--model", home / "dense", "--outputs", ",".join(OUTPUTS), "--moments", home / "m.safetensors", *images)
    result = invoked("reduce", *model, "--mlp", 0.5, "--align", "mlp=8,head=8", "--closed-loop", "-o", home / "reduced")
    # No output contains the registers of the last block.
    layers = "blocks.1.attn.proj, blocks.1.mlp.fc1, blocks.1.mlp.fc2"
    assert f"only places that outputs read count in the fits of {layers}" in " ".join(result.output.split())
    invoked("export", "--model", home / "reduced", "-o", home / "reduced" / "model.onnx", "--precision", "fp32,fp16")
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reduced_and_exported(tmp_path_factory.mktemp("named"))


@pytest.mark.slow("graph")
def test_reduced_directory_and_graph_give_named_outputs(home: Path) -> None:
    assert json.loads((home / "reduced" / "config.json").read_text())["outputs"] == list(OUTPUTS)
    session = session_of(home / "reduced" / "model.onnx")
    assert [port.name for port in session.get_outputs()] == list(OUTPUTS)
    for count in (1, 5):
        images = tiny.images(count, seed=count)
        with torch.inference_mode():
            expected = load(home / "reduced")(torch.from_numpy(images))
        got = session.run(None, {"images": images})
        for name, ours, theirs in zip(OUTPUTS, got, expected, strict=True):
            assert np.linalg.norm(ours - theirs.numpy()) < 1e-5 * float(theirs.norm()), name


@pytest.mark.slow("graph")
def test_inspect_lists_the_outputs(home: Path) -> None:
    model = ("inspect", "--model", home / "dense", "--outputs", "class,patches")
    assert "outputs of one image: class [48] (embedding), patches [16, 48] (feature map)" in invoked(*model).output
    shown = json.loads(invoked("inspect", "--model", home / "reduced", "--json").stdout)
    assert [each["name"] for each in shown["outputs"]] == list(OUTPUTS)
    assert shown["outputs"][1] == {"name": "patches", "role": "feature map", "shape": [16, 48]}


@pytest.mark.slow("graph")
def test_every_output_is_verified_at_each_link(home: Path) -> None:
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
def test_outputs_that_differ_from_the_dense_models_are_refused(home: Path) -> None:
    held_out = ("--images", home / "held-out.npy", "-o", home / "other.json")
    every = "class, patches, block0"
    other = ("verify", home / "dense", "--outputs", "class", home / "reduced", *held_out)
    refuses(f"gives {every}, expected class as the dense model does", *other)
    shown = ("inspect", "--model", home / "reduced", "--outputs", "patches")
    refuses(f"has outputs of its own: {every}; drop --outputs patches", *shown)
    refuses("got 'nose'", "inspect", "--model", home / "dense", "--outputs", "class,nose")


RECIPE = recipe(
    {
        "model": {"outputs": ["class", "patches"]},
        "calibration": {"images": "images.npy"},
        "reduce": {"mlp": 0.5, "align_mlp": 8},
        "parity": {"max_error": 0.9},
        "package": {"name": "tiny"},
    }
)


@pytest.mark.slow("graph", "engine")
@needs_rtx
def test_engine_has_the_outputs_and_fused_attention(home: Path) -> None:
    dense = ("--model", home / "dense", "--outputs", ",".join(OUTPUTS), "-o", home / "d.onnx")
    invoked("export", *dense, "--precision", "fp16")
    audit = audited(home / "d.onnx", home / "reduced" / "model.fp16.onnx")
    assert audit.passed
    assert audit.reduced.fused_attention == 2


# Limits and sweeps of models with several outputs report the worst output and list each.

NAMES = ("class", "block0")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bare = tiny.written(tmp_path_factory.mktemp("within"), 48, num_classes=0)
    np.save(bare / "held-out.npy", tiny.images(24, seed=5))
    images = ("--images", bare / "images.npy", "-o", bare / "m.safetensors")
    invoked("calibrate", "--model", bare / "dense", *images)
    return bare


def dense_and_moments(bare: Path) -> tuple[Any, ...]:
    return ("--model", bare / "dense", "--outputs", ",".join(NAMES), "--moments", bare / "m.safetensors")


def relative_errors(bare: Path, directory: Path) -> dict[str, float]:
    """Compute each output's relative error on the held-out images."""
    images = torch.from_numpy(np.load(bare / "held-out.npy"))
    exact = with_outputs(load(bare / "dense"), outputs_from_text(",".join(NAMES)))
    reduced: nn.Module = load(directory)
    assert [port.name for port in output_ports(reduced)] == list(NAMES)
    with torch.inference_mode():
        pairs = zip(NAMES, reduced(images), exact(images), strict=True)
        return {name: float((new - old).double().norm() / old.double().norm()) for name, new, old in pairs}


@pytest.mark.slow("models")
def test_within_limit_holds_at_the_worst_output(bare: Path) -> None:
    asked = ("--within", "error 0.3", "--judge", bare / "held-out.npy", "--align", "mlp=8,head=8")
    result = invoked(
        "reduce", *dense_and_moments(bare), "--images", bare / "images.npy", *asked, "--json", "-o", bare / "within"
    )
    within = json.loads(result.stdout)["within"]
    by_hand = relative_errors(bare, bare / "within")
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
    out = invoked(
        "reduce", *dense_and_moments(bare), "--images", bare / "images.npy", *asked, "-o", bare / "within"
    ).output
    assert f"at {worst}, the worst output ({other} {by_hand[other]:.3g})" in " ".join(out.split())


def test_accuracy_of_tokens_is_refused(bare: Path) -> None:
    asked = ("--within", "accuracy -1", "--judge", bare / "held-out.npy", "-o", bare / "no")
    words = ("reduce", *dense_and_moments(bare), "--images", bare / "images.npy", *asked)
    refuses("class is embedding, block0 is feature map, and only logits have labels", *words)


@pytest.mark.slow("models")
def test_sweep_reports_the_worst_output_and_lists_each(bare: Path) -> None:
    more = ("--images", bare / "held-out.npy", "--align", "mlp=8,head=8", "--min-agreement", 0.01)
    swept = ("--sparsity", "0.1,0.5", "--preset", "best", *more, "-o", bare / "sweep")
    result = invoked("sweep", *dense_and_moments(bare), *swept)
    trials = json.loads((bare / "sweep" / "sweep.json").read_text())["trials"]
    for trial, sparsity in zip(trials, (0.1, 0.5), strict=True):
        half = ("--mlp", sparsity, "--attn", sparsity, "--align", "mlp=8,head=8", "-o", bare / "half")
        invoked("reduce", *dense_and_moments(bare), *half)
        by_hand = relative_errors(bare, bare / "half")
        assert {each["name"]: each["relative_error"] for each in trial["outputs"]} == pytest.approx(by_hand, rel=1e-3)
        assert trial["relative_error"] == max(each["relative_error"] for each in trial["outputs"])
        assert trial["agreement"] == min(each["agreement"] for each in trial["outputs"])
    message = " ".join(result.output.split())
    assert "of the worst output" in message or "no trial has an error" in message
    first = trials[0]["outputs"]
    assert f"({first[0]['name']} {first[0]['relative_error']:.4f}, {first[1]['name']}" in message
    with (bare / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["relative_error block0"]) for row in rows] == [t["outputs"][1]["relative_error"] for t in trials]


# Dense heads given as files of their own: verify compares their maps behind every step, with limits for maps.

PATCHES = Port(name="patches", shape=(16, 48))


class Saliency(nn.Module):
    """A head [B,16,48] -> [B,8,8] with values in [0,1]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.ConvTranspose2d(48, 1, 2, stride=2)

    def forward(self, patches: Tensor) -> Tensor:
        return torch.sigmoid(self.up(patches.transpose(1, 2).unflatten(2, (4, 4)))).squeeze(1)


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Mean(nn.Module):
    def forward(self, patches: Tensor) -> Tensor:
        return patches.mean(dim=1)


def linear(width: int, *more: nn.Module) -> nn.Module:
    """Build a head that reads 48 channels."""
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(48, width), *more)


def segmentation() -> nn.Module:
    """Build a head [B,16,48] -> [B,5,4,4]."""
    return linear(5, Transpose(), nn.Unflatten(2, (4, 4)))


def write_head(
    module: nn.Module, path: Path, *, port: Port = PATCHES, role: Role = "feature map", batch: int | None = None
) -> None:
    outputs = [OutputPort(name="map", role=role)]
    save_onnx(onnx_from_model(module.eval(), [port], outputs, precision="fp32", batch=batch, metadata={}), path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = reduced_and_exported(tmp_path_factory.mktemp("heads"))
    write_head(Saliency(), base / "saliency.onnx")
    write_head(segmentation(), base / "classes.onnx", batch=4)
    return base


def verify(base: Path, *more: Any, code: int = 0) -> Any:
    steps = [base / "reduced", base / "reduced" / "model.onnx", base / "reduced" / "model.fp16.onnx"]
    dense = (base / "dense", "--outputs", "block0,class,patches")
    held_out = ("--images", base / "held-out.npy", "--batch", "1,5", "-o", base / "parity.json")
    result = invoked("verify", *dense, *steps, *held_out, *more, code=code)
    return result if code == 2 else json.loads((base / "parity.json").read_text())


@pytest.mark.slow("graph")
def test_feature_maps_are_judged_by_error_and_overlap(base: Path) -> None:
    heads = ("--head", base / "saliency.onnx", "--head", base / "classes.onnx")
    limits = ("--max-error", 2.0, "--max-map-error", 2.0, "--min-iou", 0.05, "--min-pixels", 0.05)
    parity = verify(base, *heads, *limits)
    links = {link["name"]: link for link in parity["links"]}
    assert len(links) == 4 * 5, "reduced, FP32, FP16 and the whole chain, each by output and by map"
    assert [head["maps"] for head in parity["heads"]] == [["saliency"], ["classes"]]
    assert parity["heads"][0]["reads"] == ["patches"]
    exact = {name: link for name, link in links.items() if link["kind"] == "exact"}
    assert {link["status"] for link in exact.values()} == {"PASS"}
    assert ["14 products" in link["tolerance"]["rule"] for link in exact.values()] == [False] * 3 + [True] * 2

    images = np.load(base / "held-out.npy")
    invoked("export", "--model", base / "dense", "--outputs", "class,patches", "-o", base / "d.onnx")
    graphs = (session_of(path) for path in (base / "d.onnx", base / "reduced/model.onnx"))
    with torch.inference_mode():
        patches = [torch.from_numpy(graph.run(["patches"], {"images": images})[0]) for graph in graphs]
        dense, reduced = (Saliency()(each).double().numpy() for each in patches)
        dense_classes, reduced_classes = (segmentation()(each).argmax(dim=1).numpy() for each in patches)
    told = links["reduced saliency"]["measures"]
    assert told["relative_error"] == pytest.approx(np.linalg.norm(reduced - dense) / np.linalg.norm(dense), rel=1e-4)
    both, either = (dense > 0.5) & (reduced > 0.5), (dense > 0.5) | (reduced > 0.5)
    assert told["iou"] == pytest.approx(both.sum() / either.sum(), abs=0.01)
    assert 0.1 < told["iou"] < 1.0
    of_classes = links["reduced classes"]["measures"]
    assert of_classes["pixel_agreement"] == pytest.approx((dense_classes == reduced_classes).mean(), abs=0.01)
    assert of_classes["threshold"] is None

    with np.load(base / "parity.npz") as by_image:
        assert any(name.startswith("saliency.") and name.endswith(".iou") for name in by_image.files)
    rule = ("gate", base / "parity.json", "--fail-if", "iou@reduced saliency < 0.99", "-o", base / "gate.json")
    invoked(*rule, code=1)
    invoked("report", base, "-o", base / "report.md")
    assert "Maps of heads" in (base / "report.md").read_text()


@pytest.mark.slow("models")
def test_map_limits_are_separate(base: Path) -> None:
    head = ("--head", base / "saliency.onnx")
    strict = verify(base, *head, "--min-iou", 1.0, "--exclude-output", "class", code=1)
    failed = {link["name"] for link in strict["links"] if link["status"] == "FAIL"}
    assert failed == {"reduced saliency", "whole saliency"}
    of_all = verify(base, *head, "--max-error", 2.0, "--max-map-error", 3.0, "--exclude-output", "class")
    limits = {link["name"]: link["tolerance"]["max_relative_error"] for link in of_all["links"]}
    names = ("reduced patches", "reduced saliency", "reduced class")
    assert [limits[name] for name in names] == [2.0, 3.0, None]
    free = {link["name"]: link["status"] for link in verify(base, *head, "--min-iou", 0.0, code=3)["links"]}
    assert [free[name] for name in names] == ["UNJUDGED", "PASS", "UNJUDGED"]
    least, most = (
        {
            link["name"]: link["measures"]["iou"]
            for link in verify(base, *head, "--max-error", 9, "--map-threshold", at)["links"][3:4]
        }
        for at in (0.2, 0.8)
    )
    assert least != most


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--min-iou", 0.5), "--min-iou: it applies to no output"),
        (("--head", "reduced/model.onnx"), "reads images, which the model does not give; it gives block0, class, pat"),
        (("--head", "nothing.onnx"), "nothing.onnx: no such ONNX file"),
        (("--head", "patches.onnx"), "heads: two outputs are called patches; maps are named after the head's file"),
        (("--head", "flat.onnx"), "score map: got [16, 48], expected [inputs, height, width] or [inputs, classes"),
    ],
)
def test_mismatched_heads_are_refused(base: Path, more: tuple[Any, ...], message: str) -> None:
    write_head(Saliency(), base / "patches.onnx")
    if "flat.onnx" in more:
        write_head(Mean(), base / "flat.onnx", role="embedding")
    words = [base / word if str(word).endswith(".onnx") else word for word in more]
    assert message in verify(base, *words, code=2).stderr


@pytest.mark.slow("graph")
def test_recipe_sets_heads_and_map_limits(base: Path) -> None:
    parity = '[parity]\nhead = ["saliency.onnx"]\nmin_iou = 0.05\nmax_map_error = 2.0'
    (base / "recipe.toml").write_text(RECIPE.replace("[parity]", parity))
    invoked("release", base / "recipe.toml", "-o", base / "release")
    assert json.loads((base / "release" / "manifest.json").read_text())["outputs"] == ["class", "patches"]
    record = json.loads((base / "release" / "parity.json").read_text())
    maps = [link for link in record["links"] if link["role"] == "score map"]
    assert {link["status"] for link in maps} == {"PASS"}
    assert "--head ../saliency.onnx --map-threshold 0.5" in (base / "release" / "report.md").read_text()
    assert "saliency.onnx" in (base / "release" / "MODEL_CARD.md").read_text()
    (base / "recipe.toml").write_text(RECIPE.replace("[parity]", "[parity]\nmin_iou = 0.5"))
    refuses("[parity]: --min-iou: it applies to no output", "release", base / "recipe.toml", "-o", base / "x")
    (base / "recipe.toml").write_text(RECIPE.replace('"class", "patches"', '"class", "nose"'))
    refuses("[model]: outputs: got 'nose'", "release", base / "recipe.toml", "-o", base / "x")


@pytest.mark.slow("graph")
def test_single_output_feeds_a_single_input_head_of_any_name(base: Path) -> None:
    write_head(linear(64, nn.Unflatten(1, (1, 8, 8))), base / "spread.onnx", port=Port(name="features", shape=(48,)))
    more = ("--images", base / "held-out.npy", "--head", base / "spread.onnx", "--map-threshold", 0, "--min-iou", 1,
            "--max-error", 0)  # fmt: skip
    invoked("verify", base / "dense", base / "dense", *more, "-o", base / "alone.json")
    parity = json.loads((base / "alone.json").read_text())
    (maps,) = (link for link in parity["links"] if link["role"] == "score map")
    assert (maps["name"], maps["status"]) == ("dense spread", "PASS")
    assert (maps["measures"]["iou"], maps["measures"]["threshold"]) == (1.0, 0.0)
    assert parity["heads"][0]["reads"] == ["logits"]
