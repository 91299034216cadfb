"""Overlap of judging with fitted data, as verify, gate, bench, perplexity, sweep and releases report it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from calib.fingerprints import Fingerprints
from calib.fingerprints_text import FingerprintsText
from calib.store import load_moments
from corp_deploy.store.checkpoint import save
from corp_deploy.store.fitted import fitted_of_lineage
from corp_deploy.store.model_config import load_model_config
from tests import decoders, tiny
from tests.command import invoked, refuses, run
from tests.doubles import some
from tests.recipes import RELEASE

NONE = {"same": 0, "alike": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dense and a reduced model, their graphs, moments and images.

    The model is fitted to 8 of the 12 calibration images; left-out.npy has the other 4, others.npy 9 of another draw,
    and mixed.npy 3 fitted images, 2 others, and one that only looks like a fitted image.
    """
    root = tmp_path_factory.mktemp("fitted")
    save(tiny.checkpoint(), root / "dense")
    images, others = tiny.images(12), tiny.images(9, seed=1)
    np.save(root / "calibration.npy", images)
    np.save(root / "others.npy", others)
    command = ("calibrate", "--model", root / "dense", "--images", root / "calibration.npy", "--hold-out", 4)
    invoked(*command, "-o", root / "moments.safetensors")
    seen = set(load_moments(root / "moments.safetensors").image_ids.tolist())
    opened = tiny.opened(root / "opened.npy", images)
    is_fitted = np.array([each in seen for each in opened.ids.tolist()])
    np.save(root / "left-out.npy", images[~is_fitted])
    mixed = np.concatenate([images[is_fitted][:3], others[:2], 1.01 * images[is_fitted][3:4]])
    np.save(root / "mixed.npy", mixed.astype(np.float32))
    reduce = ("reduce", "--model", root / "dense", "--moments", root / "moments.safetensors")
    invoked(*reduce, "--mlp", 0.5, "--align", "mlp=8", "-o", root / "reduced")
    for name in ("reduced", "dense"):
        invoked("export", "--model", root / name, "-o", root / name / "model.onnx")
    return root


def fitted_to(directory: Path) -> Fingerprints:
    return some(fitted_of_lineage(load_model_config(directory).lineage, where=str(directory))).fingerprints


def verify(home: Path, output: Path, images: str, candidate: object, *extra: object) -> tuple[Any, str]:
    """Verify a candidate; return the record of its overlap and the messages."""
    words = ("verify", home / "dense", candidate, "--images", home / images, "--batch", "2", "--max-error", 10)
    done = run(*words, "-o", output, *extra)
    assert done.exit_code in (0, 1), done.output
    return json.loads(output.read_text()), " ".join(done.stderr.split())


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("images", "expected"),
    [("calibration.npy", (12, 8, 0)), ("mixed.npy", (6, 3, 1)), ("left-out.npy", (4, 0, 0)), ("others.npy", (9, 0, 0))],
)
def test_verify_reports_overlap_with_fitted_images(
    home: Path, tmp_path: Path, images: str, expected: tuple[int, int, int]
) -> None:
    record, warnings = verify(home, tmp_path / "parity.json", images, home / "reduced")
    judging, same, alike = expected
    assert record["fitted"] == {"judging": judging, "same": same, "alike": alike, "noun": "images"}
    assert (f"{same} of which the model was fitted to" in record["line"]) == (same > 0)
    assert ("judge it on images that calibration never saw" in warnings) == (same + alike > 0)
    assert ("look like images that it was fitted to" in warnings) == (alike > 0)


@pytest.mark.slow("graph")
def test_graphs_carry_digests_and_moments_identify_models(home: Path, tmp_path: Path) -> None:
    alone = shutil.copy(home / "reduced" / "model.onnx", tmp_path / "model.onnx")
    for extra, expected in (((), (3, 0)), (("--moments", home / "moments.safetensors"), (3, 1))):
        record, _ = verify(home, tmp_path / "parity.json", "mixed.npy", alone, *extra)
        assert (record["fitted"]["same"], record["fitted"]["alike"]) == expected
    dense = shutil.copy(home / "dense" / "model.onnx", tmp_path / "dense.onnx")
    assert "fitted" not in verify(home, tmp_path / "parity.json", "mixed.npy", dense)[0]


@pytest.mark.slow("graph")
def test_graph_with_a_damaged_entry_is_refused(home: Path, tmp_path: Path) -> None:
    graph = onnx.load(home / "reduced" / "model.onnx")
    (entry,) = [each for each in graph.metadata_props if each.key.endswith("lineage")]
    for text, message in (('{"fitted": 3}', "lineage.fitted"), ("[]", "its metadata"), ("{", "its metadata")):
        entry.value = text
        onnx.save(graph, tmp_path / "broken.onnx")
        words = ("verify", home / "dense", tmp_path / "broken.onnx", "--images", home / "others.npy")
        refuses(message, *words, "-o", tmp_path / "parity.json")


def gate_row(gate: Path) -> tuple[str, float]:
    """Return the verdict and the value of a gate's own rule on overlap."""
    (row,) = [each for each in json.loads(gate.read_text())["rules"] if each["rule"] == "fitted_images > 0"]
    return row["verdict"], row["value"]


def test_gate_fails_on_overlap_unless_a_rule_allows_it(home: Path, tmp_path: Path) -> None:
    parity, gate = tmp_path / "parity.json", tmp_path / "gate.json"
    verify(home, parity, "mixed.npy", home / "reduced")
    invoked("gate", parity, "-o", gate, code=1)
    assert gate_row(gate) == ("FAIL", 3.0)
    invoked("gate", parity, "--fail-if", "fitted_images > 2", code=1)
    invoked("gate", parity, "--fail-if", "fitted_images > 3")
    verify(home, parity, "left-out.npy", home / "reduced")
    invoked("gate", parity, "-o", gate)
    alone = shutil.copy(home / "dense" / "model.onnx", tmp_path / "model.onnx")
    verify(home, parity, "mixed.npy", alone)
    invoked("gate", parity)
    refuses("doesn't say which images the model was fitted to", "gate", parity, "--fail-if", "fitted_images > 0")


@pytest.mark.slow("measurement")
def test_bench_reports_overlap_of_its_images(home: Path, tmp_path: Path) -> None:
    graphs = (home / "dense" / "model.onnx", home / "reduced" / "model.onnx")
    quick = ("--time-limit", 1, "--min-rounds", 6, "--block-ms", 1, "--half-width", 0.9, "--threads", 1)
    for images, found in (("mixed.npy", {"same": 3, "alike": 0}), ("left-out.npy", NONE), (None, None)):
        inputs = () if images is None else ("--images", home / images)
        invoked("bench", *graphs, *inputs, "--batch", 6, *quick, "-o", tmp_path / "bench.json")
        record = json.loads((tmp_path / "bench.json").read_text())
        assert (None if found is None else record["fitted"] | found) == record["fitted"]
        assert any("was fitted to" in each for each in record["warnings"]) == (images == "mixed.npy")


def test_sweep_reports_overlap(home: Path, tmp_path: Path) -> None:
    words = ("sweep", "--model", home / "dense", "--moments", home / "moments.safetensors", "--sparsity", 0.5)
    for images, same in (("mixed.npy", 3), ("left-out.npy", 0)):
        out = tmp_path / images
        done = invoked(*words, "--parts", "mlp", "--align", "mlp=8", "--images", home / images, "-o", out)
        assert json.loads((out / "sweep.json").read_text())["fitted"]["same"] == same
        page = " ".join((out / "sweep.html").read_text().split())
        assert ("was fitted to" in page) == ("was fitted to" in " ".join(done.stderr.split())) == (same > 0)


@pytest.mark.slow("models")
def test_sweep_budgets_are_divided_by_calibration_images(home: Path, tmp_path: Path) -> None:
    words = ("sweep", "--model", home / "dense", "--moments", home / "moments.safetensors", "--sparsity", 0.5)
    judging = ("--images", home / "others.npy", "--macs", 0.7, "--parts", "mlp", "--align", "mlp=8")
    done = run(*words, *judging, "-o", tmp_path / "one")
    assert "shared out by the judging images" in " ".join(done.stderr.split())
    apart = ("--calibration-images", home / "calibration.npy")
    done = invoked(*words, *judging, *apart, "--min-agreement", 0.0, "-o", tmp_path / "other")
    assert "shared out by the judging" not in done.stderr
    assert f"--macs 0.7 --align mlp=8 --images {home / 'calibration.npy'}" in " ".join(done.stdout.split())


@pytest.mark.slow("models")
def test_held_out_images_do_not_influence_a_budget(home: Path, tmp_path: Path) -> None:
    """Held-out images only judge: they settle no widths and are not recorded as fitted."""
    reduce = ("reduce", "--model", home / "dense", "--moments", home / "moments.safetensors", "--align", "mlp=8,head=8")
    budget = ("--macs", 0.7, "--images", home / "calibration.npy")
    held_out = ("--held-out", home / "moments.held-out.safetensors")
    invoked(*reduce, *budget, *held_out, "-o", tmp_path / "apart")
    invoked(*reduce, *budget, "-o", tmp_path / "all")
    apart, every = fitted_to(tmp_path / "apart"), fitted_to(tmp_path / "all")
    left_out = load_moments(home / "moments.held-out.safetensors").image_ids
    assert not torch.isin(left_out, apart.ids).any()
    assert torch.isin(left_out, every.ids).all()
    words = ("--macs", 0.7, "--images", home / "left-out.npy", *held_out, "-o", tmp_path / "none")
    refuses("all 4 images are those of the held-out moments", *reduce, *words)
    assert not (tmp_path / "none").exists()


def test_images_that_chose_a_model_do_not_prove_it(home: Path, tmp_path: Path) -> None:
    """Images that --within leaves out of the fit settle how small the model becomes, so they count as fitted."""
    words = ("reduce", "--model", home / "dense", "--moments", home / "moments.safetensors", "--align", "mlp=8,head=8")
    within = ("--within", "error 0.9", "--images", home / "calibration.npy")
    invoked(*words, *within, "-o", tmp_path / "reduced")
    record, _ = verify(home, tmp_path / "parity.json", "left-out.npy", tmp_path / "reduced")
    assert record["fitted"]["same"] == 4


def test_model_reduced_twice_keeps_its_fitted_images(home: Path, tmp_path: Path) -> None:
    model, moments = ("--model", home / "reduced"), tmp_path / "moments.safetensors"
    invoked("calibrate", *model, "--images", home / "others.npy", "-o", moments)
    invoked("reduce", *model, "--moments", moments, "--attn", 0.5, "--align", "head=8", "-o", tmp_path / "again")
    assert len(fitted_to(tmp_path / "again")) == 8 + 9


def test_damaged_entry_is_refused_by_name(home: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(home / "reduced", tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    assert FingerprintsText(**config["lineage"]["fitted"]).fingerprints
    for entry, message in ((7, "lineage.fitted"), ({"ids": "!!"}, "not base64")):
        config["lineage"]["fitted"] = entry
        (broken / "config.json").write_text(json.dumps(config))
        words = ("verify", home / "dense", broken, "--images", home / "others.npy", "-o", tmp_path / "p.json")
        refuses(message, *words)


def test_perplexity_reports_overlap_of_sequences(tmp_path: Path) -> None:
    decoders.write_decoder(tmp_path / "llama", "llama")
    decoders.write_tokenizer(tmp_path / "llama")
    (tmp_path / "text.txt").write_text(decoders.text(letters=2_000))
    (tmp_path / "other.txt").write_text(decoders.text(start=4_000, letters=2_000))
    model, moments = f"hf:{tmp_path / 'llama'}", tmp_path / "moments.safetensors"
    invoked("calibrate", "--model", model, "--text", tmp_path / "text.txt", "-o", moments)
    half = ("--mlp", 0.5, "--align", "mlp=8")
    invoked("reduce", "--model", model, "--moments", moments, *half, "-o", tmp_path / "reduced")
    for text, all_seen in (("text.txt", True), ("other.txt", False)):
        record = tmp_path / "perplexity.json"
        done = invoked("perplexity", model, tmp_path / "reduced", "--text", tmp_path / text, "-o", record)
        fitted = json.loads(record.read_text())["fitted"]
        assert fitted["same"] == (fitted["judging"] if all_seen else 0)
        assert ("was fitted to" in done.stderr) == all_seen


@pytest.mark.slow("graph")
def test_release_judged_on_fitted_images_fails_its_gate(tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    images = tiny.images(12)
    np.save(tmp_path / "calibration.npy", images)
    judging = np.concatenate([images[:5], tiny.images(4, seed=1)])
    np.savez(tmp_path / "held-out.npz", images=judging, labels=np.arange(9) % 7)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RELEASE.replace("hold_out = 4\n", ""))
    release = ("release", recipe, "-o", tmp_path / "out")
    planned = invoked(*release, "--dry-run")
    assert "on 9 images, 5 of which the model was fitted to" in " ".join(planned.stderr.split())
    assert not (tmp_path / "out").exists()
    assert "fitted_images > 0" in invoked(*release, code=1).stdout
    assert gate_row(tmp_path / "out" / "gate.json") == ("FAIL", 5.0)
    card = " ".join((tmp_path / "out" / "MODEL_CARD.md").read_text().split())
    assert "Judged on images: " in card
    assert "5 of which the model was fitted to" in card
    assert "5 of which the model was fitted to" in (tmp_path / "out" / "report.html").read_text()
    again = np.concatenate([images[:2], tiny.images(7, seed=2)])
    np.savez(tmp_path / "held-out.npz", images=again, labels=np.arange(9) % 7)
    planned = invoked(*release, "--dry-run")  # the calibration is done by now
    assert "on 9 images, 2 of which the model was fitted to" in " ".join(planned.stderr.split())
    recipe.write_text(recipe.read_text().replace('"params >= dense"', '"params >= dense", "fitted_images > 5"'))
    invoked(*release)
