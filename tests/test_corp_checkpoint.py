"""Saving and loading of model directories and weights, and refusals of damaged ones."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import corp_deploy
from corp_deploy.families.family import sites_of
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.module import replace_submodules
from corp_deploy.traced.models.narrowed_model import at_widths
from tests import tiny
from tests.refusals import rejects

NARROW = {"blocks.0.mlp": 40, "blocks.1.attn.qk": 24}


def reduced_checkpoint() -> Checkpoint:
    dense = tiny.checkpoint()
    return replace(dense, model=at_widths(dense.model, NARROW), lineage={"preset": "x"})


def test_reduced_model_round_trips_with_widths_and_outputs(tmp_path: Path) -> None:
    reduced = reduced_checkpoint()
    save(reduced, tmp_path)
    again = load_checkpoint(tmp_path)
    images = torch.from_numpy(tiny.images(2))
    torch.testing.assert_close(corp_deploy.load(tmp_path)(images), reduced.model(images), rtol=1e-5, atol=1e-5)
    assert again.lineage == {"preset": "x"}
    assert {site.name: site.width for site in sites_of(again.model).every if site.name in NARROW} == NARROW
    assert not any(parameter.is_meta for parameter in again.model.parameters())


def test_copy_with_other_modules_leaves_the_model_unchanged() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = replace_submodules(model, {"0": nn.Linear(4, 3)})
    assert new.get_parameter("0.weight").shape == (3, 4)
    assert new.get_parameter("1.0.weight") is not model.get_parameter("1.0.weight")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow("process")
def test_loading_imports_no_pruning_code(tmp_path: Path) -> None:
    save(reduced_checkpoint(), tmp_path)
    program = (
        "import sys, corp_deploy; assert 'torch' not in sys.modules; corp_deploy.load(sys.argv[1]);"
        "loaded = [m for m in sys.modules if m.startswith('corp_deploy.')];"
        "assert not [m for m in loaded if 'reduce' in m or 'recover' in m or 'select' in m or 'obs' in m], loaded"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], check=True, cwd=Path(__file__).parents[1]
    )


def load_tiny(weights: Path) -> Checkpoint:
    return load_dense(tiny.ARCHITECTURE.name, weights=weights, kwargs=tiny.ARCHITECTURE.kwargs)


def test_missing_corrupt_and_foreign_weights_are_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    rejects("expected a state_dict", load_tiny, tmp_path / "list.pt")
    rejects("no such file", load_tiny, tmp_path / "none.safetensors")
    for name in ("w.safetensors", "w.pth"):
        (tmp_path / name).write_bytes(b"\x00\x01not weights" * 10)
        rejects("can't be read", load_tiny, tmp_path / name)
    (tmp_path / "w.npz").write_bytes(bytes(9))
    rejects(r"no known format of weights, expected \.safetensors, \.pth", load_tiny, tmp_path / "w.npz")


def test_mismatched_weights_are_refused(tmp_path: Path) -> None:
    state = tiny.checkpoint().model.state_dict()
    wrong = {**state, "head.weight": torch.zeros(3, 48), "extra": torch.zeros(1)}
    del wrong["norm.bias"]
    save_file(wrong, tmp_path / "w.safetensors")
    mismatch = r"missing: norm.bias; unexpected: extra; wrong shape: head.weight \(3, 48\) instead of \(7, 48\)"
    rejects(mismatch, load_tiny, tmp_path / "w.safetensors")
    state["blocks.0.mlp.fc1.bias"][3] = torch.nan
    save_file(state, tmp_path / "nan.safetensors")
    rejects(r"NaN or Inf in blocks.0.mlp.fc1.bias", load_tiny, tmp_path / "nan.safetensors")


def test_timm_names_and_directories_are_not_confused(tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path)
    rejects("drop --weights", load_dense, str(tmp_path), weights=tmp_path / "model.safetensors", kwargs={})
    rejects("needs --weights", load_dense, "deit_tiny_patch16_224", weights=None, kwargs={})
    rejects("deit_tiny_patch16_224", load_dense, "deit_tiny_patch16_999", weights=None, kwargs={})
    rejects("no_such_argument", load_dense, "deit_tiny_patch16_224", weights=None, kwargs={"no_such_argument": 1})


def test_damaged_directories_are_refused(tmp_path: Path) -> None:
    rejects("no such file", load_checkpoint, tmp_path)
    save(tiny.checkpoint(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    rejects("changed or cut off", load_checkpoint, tmp_path)
    weights.unlink()
    rejects("no such file", load_checkpoint, tmp_path)
    config = tmp_path / "config.json"
    record = json.loads(config.read_text())
    for change, message in (({"kind": "other"}, "expected a corp-deploy/model record"), ({"version": 2}, "version 2")):
        config.write_text(json.dumps(record | change))
        rejects(message, load_checkpoint, tmp_path)
    config.write_text("{")
    rejects("not JSON", load_checkpoint, tmp_path)
