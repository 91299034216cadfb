"""A text encoder through the commands: calibrate, reduce, export, verify, bench, package."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from corp_deploy import load
from corp_deploy.families.family import text_spec
from tests import encoders
from tests.command import invoked, refuses


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of two blocks, texts to calibrate on and others to judge by, and the moments."""
    directory = tmp_path_factory.mktemp("text")
    encoders.write_encoder(directory / "hf", num_attention_heads=2)
    documents = encoders.texts(40)
    (directory / "calibration.txt").write_text("\n".join(documents[:28]))
    (directory / "held-out.txt").write_text("\n".join(documents[28:]) + "\n\n")
    result = invoked("calibrate", *model(directory), "--text", directory / "calibration.txt", "-o", moments(directory))
    assert "6 sites, 28 documents" in result.output
    return directory


def model(home: Path) -> tuple[str, str]:
    return "--model", f"hf:{home / 'hf'}"


def moments(home: Path) -> Path:
    return home / "moments.safetensors"


def reduced(home: Path, name: str, *options: Any) -> Path:
    """The encoder reduced by these options."""
    arguments = ("reduce", *model(home), "--moments", moments(home), "--align", "mlp=16,head=8")
    invoked(*arguments, *options, "-o", home / name)
    return home / name


@pytest.mark.slow("graph")
def test_an_encoder_goes_from_texts_to_a_packaged_graph(home: Path) -> None:
    directory = reduced(home, "reduced", "--mlp", 0.5, "--attn", 0.5)
    (home / "hf").rename(home / "away")  # nothing below needs the source
    try:
        _exported_verified_and_timed(home, directory)
    finally:
        (home / "away").rename(home / "hf")


def _exported_verified_and_timed(home: Path, directory: Path) -> None:
    sites = json.loads((directory / "config.json").read_text())["sites"]
    assert [len(sites[f"blocks.1.{name}"].get("kept", range(32))) for name in ("mlp", "attn.qk", "attn.v")] == [
        32,
        16,
        32,
    ]
    graph, half = directory / "model.onnx", directory / "model.fp16.onnx"
    invoked("export", "--model", directory, "-o", graph, "--precision", "fp32,fp16")
    tokens = text_spec(load(directory)).encoder()(["", *encoders.texts(5)])
    feeds = {name: tensor.numpy() for name, tensor in tokens.items()}
    expected = load(directory)(*tokens.values()).numpy()
    for path, allowed in ((graph, 1e-4), (half, 2e-2)):
        (answers,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["embedding"], feeds)
        np.testing.assert_allclose(answers, expected, rtol=0.0, atol=allowed)
    parity = home / "parity.json"
    text = ("--text", home / "held-out.txt")
    invoked("verify", directory, directory, graph, half, *text, "-o", parity, "--batch", "1,5", "--max-error", 0.5)
    links = {link["name"]: link for link in json.loads(parity.read_text())["links"]}
    assert {link["status"] for link in links.values()} == {"PASS"}
    assert {link["role"] for link in links.values()} == {"embedding"}
    quick = ("--time-limit", 0.5, "--half-width", 0.9, "--min-rounds", 6, "--block-ms", 2)
    short = ("--batch", 2, *quick, "-o", home / "bench.json")
    invoked("bench", directory, graph, *text, *short)
    invoked("bench", graph, graph, *short)
    assert "has no tokenizer" in invoked("bench", graph, graph, *text, *short, code=2).stderr
    invoked("package", home, "-o", home / "repository", "--name", "encoder")
    assert "0 findings" in invoked("package", "lint", home / "repository").output
    (configuration, *_) = sorted((home / "repository").rglob("config.pbtxt"))
    assert "attention_mask" in configuration.read_text()


def test_budgets_look_at_texts(home: Path) -> None:
    text = ("--text", home / "calibration.txt")
    record = json.loads((reduced(home, "budget", "--macs", 0.7, *text) / "config.json").read_text())
    (by_site, *_) = record["lineage"]["reduction"]["ways"]
    assert by_site["share"] <= 0.7


def test_closed_loops_and_folds_look_at_texts(home: Path) -> None:
    text = ("--text", home / "calibration.txt")
    for loop in ("asymmetric", "symmetric"):
        directory = reduced(home, loop, "--mlp", 0.5, "--attn", 0.5, "--closed-loop", loop, *text)
        assert len(json.loads((directory / "config.json").read_text())["sites"]["blocks.1.mlp"]["kept"]) == 32
    folded = reduced(home, "folded", "--mlp", 0.5, "--preset", "fold", *text)
    assert len(json.loads((folded / "config.json").read_text())["sites"]["blocks.1.mlp"]["kept"]) == 32


def test_polishes_look_at_texts(home: Path) -> None:
    text = ("--text", home / "calibration.txt")
    for polish in ("block", "model", "layer"):
        options = ("--mlp", 0.5, "--polish", polish, "--polish-steps", 3)
        record = json.loads((reduced(home, polish, *options, *text) / "config.json").read_text())["lineage"]
        assert record["reduction"]["polish"]["how"] == polish


def test_a_sweep_scores_embeddings(home: Path) -> None:
    arguments = ("sweep", *model(home), "--moments", moments(home), "--text", home / "held-out.txt")
    options = ("--sparsity", 0.5, "--macs", 0.8, "--align", "mlp=16,head=8", "-o", home / "sweep")
    invoked(*arguments, *options)
    points = json.loads((home / "sweep" / "sweep.json").read_text())["trials"]
    best, none = (point["relative_error"] for point in points if point["budget"] is None)
    assert 0.0 < best < none


def test_a_sweep_fits_merged_channels_to_texts(home: Path) -> None:
    arguments = ("sweep", *model(home), "--moments", moments(home), "--text", home / "held-out.txt")
    options = (
        "--sparsity", 0.5, "--preset", "grail-fold,fold", "--parts", "mlp", "--align", "mlp=16", "-o", home / "folds",
    )  # fmt: skip
    refuses("give --calibration-images, or --calibration-text for a text encoder", *arguments, *options)
    refuses("--calibration-images", *arguments, *options, "--calibration-images", home / "held-out.txt")
    invoked(*arguments, *options, "--calibration-text", home / "calibration.txt")
    published, refitted = json.loads((home / "folds" / "sweep.json").read_text())["trials"]
    assert refitted["relative_error"] < published["relative_error"]


def test_inspect_tells_how_texts_are_prepared(home: Path) -> None:
    record = json.loads(invoked("inspect", *model(home), "--json").stdout)
    assert record["preprocessing"]["length"] == 24
    assert "texts of 24 tokens, cut or padded" in invoked("inspect", *model(home)).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("calibrate", "--images", "calibration.txt"), "the model takes text, not images; give --text"),
        (("calibrate",), "Missing option '--images', or '--text' or '--tokens' for a model that takes text, or"),
        (("calibrate", "--text", "calibration.txt", "--images", "calibration.txt"), "exclude each other"),
        (("calibrate", "--text", "calibration.txt", "--workers", "2"), "--workers"),
        (("calibrate", "--text", "none.txt"), "none.txt: no such file"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_message(
    arguments: tuple[str, ...], message: str, home: Path
) -> None:
    command, *rest = (home / word if word.endswith(".txt") else word for word in arguments)
    result = invoked(command, *model(home), *rest, "-o", home / "refused.safetensors", code=2)
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_texts_for_an_image_model_are_refused(home: Path) -> None:
    from corp_deploy.store.checkpoint import save
    from tests import tiny

    save(tiny.checkpoint(), home / "vit")
    arguments = ("--model", home / "vit", "--text", home / "calibration.txt", "-o", home / "refused.safetensors")
    assert "the model takes images, not text; give --images" in invoked("calibrate", *arguments, code=2).stderr
