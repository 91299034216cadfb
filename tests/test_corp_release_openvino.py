"""A release whose only target is OpenVINO: its times, proofs, reports and server configuration."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from corp_deploy import load
from perf.parity.parity import load_parity
from tests import tiny
from tests.command import invoked
from tests.recipes import recipe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
SCORE = """\
import sys
import numpy as np
with np.load(sys.argv[1]) as file:
    assert len(file["names"]) == len(file["labels"])
    print((file["logits"].argmax(1) == file["labels"]).mean())
"""
RECIPE = recipe(
    {
        "calibration": {"batch_size": 4, "hold_out": 3, "snapshots": [4, 6]},
        "held_out": {"images": "held-out.npz", "labels": "held-out.npz"},
        "reduce": {"mlp": 0.3, "align_mlp": 8},
        "targets.openvino": {},
        "parity": {
            "batches": [1, 3],
            "min_agreement": 0.5,
            "max_error": None,
            "metric": ["hits=PYTHON score.py {outputs}"],
            "metric_files": ["score.py"],
        },
        "gate": {"fail_if": ["params >= dense", "metric.hits < baseline - 0.01"]},
        "package": {"name": "tiny"},
    }
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("release"), 12, to="calibration.npy")
    np.savez(root / "held-out.npz", images=tiny.images(9, seed=1), labels=np.arange(9) % 7)
    (root / "recipe.toml").write_text(RECIPE.replace("PYTHON", sys.executable))
    (root / "score.py").write_text(SCORE)
    baseline = ("--baseline-parity", root / "base.json", "--init-baseline", "--trust-code")
    invoked("release", root / "recipe.toml", "-o", root / "out", *baseline)
    return root


@pytest.mark.slow("graph")
def test_target_is_timed_and_proved_in_openvino(home: Path) -> None:
    out = home / "out"
    subjects = json.loads((out / "bench.json").read_text())["subjects"]
    assert [each["describe"]["backend"] for each in subjects] == ["openvino"] * 2
    assert [each["describe"]["computed_in"] for each in subjects] == ["fp32"] * 2
    assert "openvino" in (out / "parity.openvino.json").read_text()
    assert "openvino" in (out / "report.md").read_text().lower()
    assert "openvino" in (out / "MODEL_CARD.md").read_text().lower()


@pytest.mark.slow("graph")
def test_inconclusive_samples_are_judged_on_the_held_out_images(home: Path) -> None:
    """Three agreeing samples can't show an agreement of 50 %, but nine held-out images can."""
    whole, of_target = (load_parity(home / "out" / f"parity{name}.json") for name in ("", ".openvino"))
    assert [each.status for each in whole.links] == ["PASS"] * 3
    assert [each.status for each in of_target.links] == ["UNJUDGED", "PASS", "UNJUDGED"]
    assert "these are 3; it is judged on the held-out images" in of_target.links[0].reason
    assert (whole.verdict, of_target.verdict) == ("PASS", "PASS")


@pytest.mark.slow("graph")
def test_report_shows_how_many_images_suffice(home: Path) -> None:
    out = home / "out"
    size = json.loads((out / "calibration-size.json").read_text())
    assert [point["images"] for point in size["points"]] == [4, 6, 9]
    assert size["sentence"] in (out / "report.md").read_text()
    with np.load(home / "held-out.npz") as file:
        images = torch.from_numpy(file["images"])
    dense, reduced = load(out / "dense"), load(out / "reduced")
    with torch.no_grad():
        right, got = dense(images).double(), reduced(images).double()
    error = ((got - right).norm(dim=1) / right.norm(dim=1)).mean()
    assert size["points"][-1]["relative_error"] == pytest.approx(float(error), rel=1e-3)


@pytest.mark.slow("graph")
def test_openvino_repository_passes_lint(home: Path) -> None:
    out = home / "out"
    configs = [path.read_text() for path in (out / "repository").rglob("config.pbtxt")]
    assert any('backend: "openvino"' in text for text in configs)
    for command, place in ((["package", "lint"], out / "repository"), (["check"], out)):
        invoked(*command, place)


@pytest.mark.slow("graph")
def test_target_accuracy_uses_labelled_samples(home: Path) -> None:
    out = home / "out"
    images = torch.from_numpy(np.load(out / "samples/images.npy"))
    with torch.no_grad():
        right = tiny.checkpoint().model(images).argmax(1).numpy() == np.arange(3) % 7
    rows = load_parity(out / "parity.openvino.json").metrics
    assert [row.name for row in rows] == ["hits"] * 3
    assert rows[0].value == right.mean()
    assert len(load_parity(out / "parity.json").metrics) == 3, "the chain, on all held-out images"
    assert (home / "base.json").read_bytes() == (out / "parity.openvino.json").read_bytes()
    (row,) = [row for row in json.loads((out / "gate.json").read_text())["rules"] if row["metric"] == "hits"]
    assert row["verdict"] == "UNJUDGED", "the first release, which became the baseline"
