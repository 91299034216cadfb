"""Limits of `verify` on models with several outputs, maps or a single logit, and on graphs of a fixed batch."""

import json
from pathlib import Path

import numpy as np
import pytest

from corp_deploy.proof.candidates import Candidate, require_batches
from corp_deploy.proof.limits import ParityLimits
from ground.ports import OutputPort
from ground.precision import FLOAT32
from tests.command import invoked, refuses
from tests.refusals import rejects

CLASS = OutputPort(name="class", role="logits")
MASK = OutputPort(name="mask", role="score map")
BOXES = OutputPort(name="boxes", role="feature map")


def test_general_limits_apply_to_every_output_and_specific_ones_override() -> None:
    limits = ParityLimits(
        max_error=0.1, min_agreement=0.9, max_map_error=0.2, min_iou=0.8, output_limit=("boxes:max_error=0.3",)
    )
    found = {port.name: limits.of_port(port) for port in (CLASS, MASK, BOXES)}
    assert {name: each.max_relative_error for name, each in found.items()} == {"class": 0.1, "mask": 0.2, "boxes": 0.3}
    assert {name: each.min_agreement for name, each in found.items()} == {"class": 0.9, "mask": 0.9, "boxes": 0.9}
    assert {name: each.min_iou for name, each in found.items()} == {"class": None, "mask": 0.8, "boxes": None}
    assert ParityLimits(exclude_output=("boxes",), max_error=0.1).of_port(BOXES).excluded
    assert limits.shares == {"min_agreement": 0.9}
    assert ParityLimits(output_limit=("a:min_agreement=0.7",)).shares == {"a:min_agreement": 0.7}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ParityLimits(max_map_error=0.1), r"--max-map-error: it applies to no output, since the model gives class \("),
        (ParityLimits(min_iou=0.1), "--min-iou: it applies to no output"),
        (ParityLimits(min_pixels=0.1), "--min-pixels: it applies to no output"),
        (ParityLimits(output_limit=("class:min_iou=0.5",)), "--output-limit class:min_iou: it applies to no output"),
        (ParityLimits(output_limit=("masks:max_error=0.5",)), "--output-limit: there is no output 'masks'; the model"),
        (ParityLimits(exclude_output=("masks",)), "--exclude-output: there is no output 'masks'"),
        (ParityLimits(exclude_output=("class", "boxes")), "it excludes every output, so that nothing is judged"),
        (
            ParityLimits(max_error=0.1, output_limit=("class:max_error=0.5", "boxes:max_error=0.5")),
            "--max-error: it applies to no output",
        ),
    ],
)
def test_limit_without_effect_is_refused(limits: ParityLimits, message: str) -> None:
    rejects(message, limits.require_applied, [CLASS, BOXES])


@pytest.mark.parametrize(
    "text", ["max_error=0.1", "class:max_errors=0.1", "class:max_error=much", ":max_error=1", "class:min_agreement=2"]
)
def test_malformed_output_limits_are_refused(text: str) -> None:
    rejects("output limit ", lambda: ParityLimits(output_limit=(text,)))
    rejects("has a max_error already", lambda: ParityLimits(output_limit=("a:max_error=1", "a:max_error=2")))


def graph_of_batch(batch: int) -> Candidate:
    path = Path(f"b{batch}.onnx")
    return Candidate(label=path.name, name=path.stem, form="graph", path=path, float_type=FLOAT32, batch=batch)


def test_batch_sizes_a_fixed_graph_skips_are_named() -> None:
    free, one, four = (graph_of_batch(batch) for batch in (0, 1, 4))
    (warning,) = require_batches([one, free], (1, 8))
    assert warning == "b1.onnx: its batch is fixed at 1; batch 8 is not run on it"
    assert require_batches([free], (1, 8)) == []
    rejects("no candidate runs at batch 8, as every one is fixed at 1", require_batches, [one], (1, 8))
    rejects("its batch is fixed at 4, and --batch 1,8 leaves that out", require_batches, [four, free], (1, 8))


CODE = """
import torch
from torch import nn
class Net(nn.Module):
    input_size = (3, 16, 16)
    def __init__(self, seed, kind):
        super().__init__(); torch.manual_seed(seed); self.kind = kind
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1), nn.Linear(8, 1)
    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.b(x) if self.kind == "map" else self.c(x.mean((2, 3)))
def build(seed=0, kind="map"): return Net(seed, kind)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a user's module and images."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE)
    np.save(tmp_path / "images.npy", np.random.default_rng(0).standard_normal((24, 3, 16, 16)).astype(np.float32))
    return tmp_path


def verify(kind: str, graph: str, *words: object) -> tuple[object, ...]:
    kwargs = json.dumps({"kind": kind})
    return ("verify", "module:net.py:build", "--model-kwargs", kwargs, "--trust-code", graph, "--images", "images.npy",
            "-o", "parity.json", "--batch", 4, *words)  # fmt: skip


def export(kind: str, seed: int, path: str) -> None:
    kwargs = json.dumps({"kind": kind, "seed": seed})
    invoked("export", "--model", "module:net.py:build", "--model-kwargs", kwargs, "--trust-code", "-o", path)


def test_max_error_fails_a_graph_with_a_different_map(home: Path) -> None:
    export("map", 1, "other.onnx")
    output = invoked(*verify("map", "other.onnx", "--max-error", 0.05), code=1).stdout
    assert "whole" in output
    assert "no limit was set" not in output
    links = {link["name"]: link["status"] for link in json.loads((home / "parity.json").read_text())["links"]}
    assert links["whole"] == "FAIL"
    refuses("--min-iou: it applies to no output", *verify("one", "other.onnx", "--min-iou", 0.5))


def test_single_logit_is_judged_with_labels_0_and_1(home: Path) -> None:
    export("one", 0, "same.onnx")
    np.save(home / "labels.npy", np.arange(24) % 2)
    words = ("--min-agreement", 0.5, "--labels", "labels.npy", "--logit-threshold")
    above = invoked(*verify("one", "same.onnx", *words, 9), code=3)
    assert "at or below 9 on every image" in " ".join(above.stdout.split())
    record = json.loads((home / "parity.json").read_text())
    assert [row["accuracy"] for row in record["accuracy"]] == [0.5, 0.5]
    assert "accuracy of dense torch fp32: 50.00 %" in " ".join(above.stdout.split())
