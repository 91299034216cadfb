"""What commands say of a model that has no attention, and what they refuse."""

import json
from pathlib import Path

import pytest

from corp_deploy.store.checkpoint import save
from tests import tiny
from tests.command import invoked
from tests.small_models import pixels, small

NONE = "is not honoured by a model without attention"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dense ConvNeXt with its images and moments."""
    checkpoint = small("convnext_atto")
    save(checkpoint, tmp_path / "dense")
    tiny.opened(tmp_path / "images.npy", pixels(checkpoint.model, 24).numpy(), checkpoint.model)
    monkeypatch.chdir(tmp_path)
    invoked("calibrate", "--model", "dense", "--images", "images.npy", "-o", "moments.safetensors", "-q")
    return tmp_path


@pytest.mark.slow("models")
def test_what_asks_for_heads_is_refused(home: Path) -> None:
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


@pytest.mark.slow("models")
def test_nothing_is_said_of_attention(home: Path) -> None:
    sweep = ("sweep", "--model", "dense", "--moments", "moments.safetensors", "--images", "images.npy", "-o", "swept")
    printed = [
        invoked("inspect", "--model", "dense").output,
        invoked("calibrate", "--model", "dense", "--images", "images.npy", "-o", "other.safetensors").output,
        invoked("reduce", "--model", "dense", "--moments", "moments.safetensors", "--mlp", 0.5, "-o", "reduced").output,
        invoked("inspect", "redundancy", "--moments", "moments.safetensors", "-o", "redundancy.svg").output,
        invoked(*sweep, "--sparsity", 0.5, "--min-agreement", 0.01).output,
    ]
    printed.append((home / "redundancy.svg").read_text())
    for text in printed:
        assert "ttention" not in text
        assert "--attn" not in text
    assert not any("Q/K" in text for text in printed[:4])
    labels = [f">{place}</text>" in printed[-1] for place in ("0.0", "1.0", "2.0", "2.1", "3.0")]
    assert all(labels)
    best = next(trial for trial in json.loads((home / "swept/sweep.json").read_text())["trials"])
    assert (best["preset"], best["attention_sparsity"], best["sites_refused"]) == ("best", 0.0, 0)
