"""A family of models that nothing but this file knows goes through calibrate, reduce, export and verify."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from corp_deploy import load
from corp_deploy.families import family
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, save
from tests import tiny
from tests.command import invoked
from tests.refusals import rejects
from tests.tiny import enliven
from tests.traced_examples import SIDE, Patched

SHAPE = (3, SIDE, SIDE)
SITES = ["stem", *(f"h.{number}{part}" for number in (0, 1) for part in (".attn.qk", ".attn.v", ""))]


def build(architecture: Architecture) -> nn.Module:
    return Patched(**architecture.kwargs).eval()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a dense model, images to calibrate on and others to judge by."""
    monkeypatch.setattr(family, "_BUILDERS", {**family._BUILDERS, "patched": build})
    architecture = Architecture(name="two blocks", kwargs={"depth": 2}, family="patched")
    model = family.dense_model(architecture)
    enliven(model, 0)
    save(Checkpoint(model=model, architecture=architecture, lineage={}), tmp_path / "dense")
    generator = torch.Generator().manual_seed(1)
    for name, count in (("calibration", 96), ("held-out", 24)):
        np.save(tmp_path / f"{name}.npy", torch.randn(count, *SHAPE, generator=generator).numpy())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow("graph")
def test_custom_family_passes_the_whole_chain(home: Path) -> None:
    sites = json.loads(invoked("inspect", "--model", "dense", "--json").stdout)["sites"]
    assert [site["site"] for site in sites] == SITES
    invoked("calibrate", "--model", "dense", "--images", "calibration.npy", "-o", "m.safetensors", "-q")
    options = ("--moments", "m.safetensors", "--mlp", 0.5, "--attn", 0.5, "--align", "mlp=8,head=8", "-q")
    invoked("reduce", "--model", "dense", *options, "-o", "reduced")
    invoked("reduce", "--model", "dense", *options, "--preset", "none", "-o", "unrepaired")
    images = torch.from_numpy(np.load("held-out.npy"))
    with torch.inference_mode():
        dense, reduced, unrepaired = (load(name)(images) for name in ("dense", "reduced", "unrepaired"))
    assert tiny.relative(reduced, dense) < 0.8 * tiny.relative(unrepaired, dense)
    invoked("export", "--model", "reduced", "--precision", "fp32,fp16", "-o", "reduced/model.onnx", "-q")
    chain = ("dense", "reduced", "reduced/model.onnx", "reduced/model.fp16.onnx")
    invoked(
        "verify", *chain, "--images", "held-out.npy", "--batch", "1,4", "--max-error", 2.0, "-o", "parity.json", "-q"
    )
    links = {link["name"]: link for link in json.loads((home / "parity.json").read_text())["links"]}
    assert {link["status"] for link in links.values()} == {"PASS"}
    assert links["reduced-onnx-fp32"]["measures"]["relative_error"] < 1e-4


def test_missing_family_is_named(home: Path) -> None:
    family._BUILDERS.pop("patched")
    rejects("family 'patched': expected one of timm, module", load, "dense")
