"""Limits and sweeps of models with several outputs: what is said is of the worst one, and each is listed."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from corp_deploy import load
from corp_deploy.families.family import output_ports, with_outputs
from corp_deploy.traced.models.outputs import outputs_from_text
from tests import tiny
from tests.command import invoked

NAMES = ("class", "block0")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tiny.written(tmp_path_factory.mktemp("within"), 48, num_classes=0)
    np.save(home / "held-out.npy", tiny.images(24, seed=5))
    images = ("--images", home / "images.npy", "-o", home / "m.safetensors")
    invoked("calibrate", "--model", home / "dense", *images)
    return home


def dense(home: Path) -> tuple[Any, ...]:
    return ("--model", home / "dense", "--outputs", ",".join(NAMES), "--moments", home / "m.safetensors")


def errors(home: Path, directory: Path) -> dict[str, float]:
    """Of each output on the held-out images, by hand."""
    images = torch.from_numpy(np.load(home / "held-out.npy"))
    exact = with_outputs(load(home / "dense"), outputs_from_text(",".join(NAMES)))
    reduced: nn.Module = load(directory)
    assert [port.name for port in output_ports(reduced)] == list(NAMES)
    with torch.inference_mode():
        pairs = zip(NAMES, reduced(images), exact(images), strict=True)
        return {name: float((new - old).double().norm() / old.double().norm()) for name, new, old in pairs}


@pytest.mark.slow("models")
def test_the_smallest_model_keeps_the_limit_at_its_worst_output(home: Path) -> None:
    asked = ("--within", "error 0.3", "--judge", home / "held-out.npy", "--align", "mlp=8,head=8")
    result = invoked("reduce", *dense(home), "--images", home / "images.npy", *asked, "--json", "-o", home / "within")
    within = json.loads(result.stdout)["within"]
    by_hand = errors(home, home / "within")
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
    out = invoked("reduce", *dense(home), "--images", home / "images.npy", *asked, "-o", home / "within").output
    assert f"at {worst}, the worst output ({other} {by_hand[other]:.3g})" in " ".join(out.split())


def test_accuracy_is_not_of_tokens(home: Path) -> None:
    asked = ("--within", "accuracy -1", "--judge", home / "held-out.npy", "-o", home / "no")
    refused = invoked("reduce", *dense(home), "--images", home / "images.npy", *asked, code=2)
    assert "class is embedding, block0 is feature map, which no label is of" in refused.stderr


def test_a_sweep_says_the_worst_output_and_lists_each(home: Path) -> None:
    more = ("--images", home / "held-out.npy", "--align", "mlp=8,head=8", "--min-agreement", 0.01)
    swept = ("--sparsity", "0.1,0.5", "--preset", "best", *more, "-o", home / "sweep")
    result = invoked("sweep", *dense(home), *swept)
    trials = json.loads((home / "sweep" / "sweep.json").read_text())["trials"]
    for trial, sparsity in zip(trials, (0.1, 0.5), strict=True):
        half = ("--mlp", sparsity, "--attn", sparsity, "--align", "mlp=8,head=8", "-o", home / "half")
        invoked("reduce", *dense(home), *half)
        by_hand = errors(home, home / "half")
        assert {each["name"]: each["relative_error"] for each in trial["outputs"]} == pytest.approx(by_hand, rel=1e-3)
        assert trial["relative_error"] == max(each["relative_error"] for each in trial["outputs"])
        assert trial["agreement"] == min(each["agreement"] for each in trial["outputs"])
    said = " ".join(result.output.split())
    assert "of the worst output" in said or "no model tried errs" in said
    first = trials[0]["outputs"]
    assert f"({first[0]['name']} {first[0]['relative_error']:.4f}, {first[1]['name']}" in said
    with (home / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["relative_error block0"]) for row in rows] == [t["outputs"][1]["relative_error"] for t in trials]
