"""An MLP with few channels is reduced by default, and the reduction says which multiple its width has."""

from pathlib import Path

import numpy as np
import pytest

from tests.command import invoked

CODE = """
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 5))
    net.input_size = (3, 4, 4)
    return net
"""


def test_half_of_64_channels_is_removed_and_the_multiple_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE)
    np.save(tmp_path / "images.npy", np.random.default_rng(0).standard_normal((64, 3, 4, 4)).astype(np.float32))
    model = ("--model", "module:net.py:build", "--trust-code")
    invoked("calibrate", *model, "--images", "images.npy", "-o", "m.safetensors")
    done = invoked("reduce", *model, "--moments", "m.safetensors", "--mlp", 0.5, "-o", "r")
    assert "as it has 64 channels, its width is a multiple of 8, not of 64; see --align" in " ".join(
        done.stderr.split()
    )
    assert "32" in done.stdout
    kept = invoked("reduce", *model, "--moments", "m.safetensors", "--mlp", 0.5, "--align", "mlp=64", "-o", "s", code=2)
    assert "nothing would be removed" in " ".join(kept.stderr.split())
