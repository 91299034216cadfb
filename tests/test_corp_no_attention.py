"""Attention options in commands on a model without attention."""

from pathlib import Path

import pytest

from corp_deploy.store.checkpoint import save
from tests import tiny
from tests.command import invoked
from tests.small_models import pixels, small

NONE = "has no effect on a model without attention"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a dense ConvNeXt with its images and moments to the current directory."""
    checkpoint = small("convnext_atto")
    save(checkpoint, tmp_path / "dense")
    tiny.opened(tmp_path / "images.npy", pixels(checkpoint.model, 24).numpy(), checkpoint.model)
    monkeypatch.chdir(tmp_path)
    invoked("calibrate", "--model", "dense", "--images", "images.npy", "-o", "moments.safetensors", "-q")
    return tmp_path


@pytest.mark.slow("models")
def test_attention_options_are_refused_without_attention(home: Path) -> None:
    reduce = ("reduce", "--model", "dense", "--moments", "moments.safetensors", "-o", "reduced")
    for options, words in (
        (("--attn", 0.5), "--attn 0.5"),
        (("--mlp", 0.5, "--attn", 0.25), "--attn 0.25"),
        (("--macs", 0.7, "--heads", "square", "--images", "images.npy"), "--heads square"),
        (("--mlp", 0.5, "--heads", "auto", "--images", "images.npy"), "--heads auto"),
    ):
        assert f"{words} {NONE} (ConvNeXt, which has MLPs)" in invoked(*reduce, *options, code=2).output
        assert not (home / "reduced").exists()
    calibrate = ("calibrate", "--model", "dense", "--images", "images.npy", "-o", "other.safetensors")
    assert f"--attention-system {NONE}" in invoked(*calibrate, "--attention-system", code=2).output
    assert "no attention of tokens is found" in invoked(*calibrate, "--merge-tokens", 2, code=2).output
    sweep = ("sweep", "--model", "dense", "--moments", "moments.safetensors", "--images", "images.npy", "-o", "swept")
    assert f"--parts attn {NONE}" in invoked(*sweep, "--parts", "attn", code=2).output
