"""Vision models of transformers through the commands: inspect, calibrate, reduce, export, verify."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from corp_deploy import load
from corp_deploy.cli import main
from tests import hf_towers, tiny

pytest.importorskip("transformers", reason="transformers is not installed, so that there are no models of it")


def invoked(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + result.stderr
    return result


def calibrated(home: Path, name: str, **changes: Any) -> tuple[str, ...]:
    """A tower, moments of images, and what tells a command of them."""
    hf_towers.write_tower(home / "hf", name, **changes)
    np.save(home / "images.npy", tiny.images(48))
    np.save(home / "held-out.npy", tiny.images(16, seed=5))
    model = ("--model", f"hf:{home / 'hf'}")
    result = invoked("calibrate", *model, "--images", home / "images.npy", "-o", home / "moments.safetensors")
    assert "4 sites" in result.output
    return (*model, "--moments", str(home / "moments.safetensors"), "--align", "mlp=8,head=8")


@pytest.mark.parametrize(
    ("name", "role", "options"),
    [
        ("Dinov2ForImageClassification", "logits", ("--mlp", 0.5, "--attn", 0.5)),
        ("CLIPVisionModelWithProjection", "embedding", ("--mlp", 0.5, "--attn", 0.5, "--closed-loop")),
        ("SiglipVisionModel", "embedding", ("--macs", 0.8)),
    ],
)
def test_a_tower_goes_from_its_directory_to_a_graph(tmp_path: Path, name: str, role: str, options: Any) -> None:
    reduce = ("reduce", *calibrated(tmp_path, name))
    shown = json.loads(invoked("inspect", "--model", f"hf:{tmp_path / 'hf'}", "--json").stdout)
    assert shown["weights"]["class"] == name
    images = () if len(options) == 4 else ("--images", tmp_path / "images.npy")
    directory, graph, record = (tmp_path / each for each in ("reduced", "model.onnx", "parity.json"))
    invoked(*reduce, *options, *images, "-o", directory)
    invoked("export", "--model", directory, "-o", graph)
    held_out = ("--images", tmp_path / "held-out.npy", "--batch", "1,5", "--max-error", 2.0)
    loose = ("--min-agreement", 0.0) if role == "logits" else ()
    invoked("verify", directory, directory, graph, *held_out, *loose, "-o", record)
    links = json.loads(record.read_text())["links"]
    assert {link.get("role", "logits") for link in links} == {role}
    assert {link["status"] for link in links} == {"PASS"}, links


def test_nothing_removed_is_the_same_model(tmp_path: Path) -> None:
    import torch

    arguments = calibrated(tmp_path, "SiglipVisionModel")
    invoked("reduce", *arguments, "--mlp", 0, "--attn", 0, "--allow-partial", "-o", tmp_path / "whole")
    images = torch.from_numpy(tiny.images(4, seed=9))
    dense = hf_towers.tower("SiglipVisionModel")(images).pooler_output
    torch.testing.assert_close(load(tmp_path / "whole")(images), dense, rtol=1e-5, atol=1e-5 * float(dense.abs().max()))
