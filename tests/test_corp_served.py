"""From a reduced model to a real inference server by the commands: it answers what the reduced torch model says."""

from pathlib import Path

import numpy as np
import pytest
import torch

import corp_deploy
from corp_deploy.store.checkpoint import save
from tests import tiny
from tests.command import invoked
from tests.triton_server import Server, lack, run_clients

REASON = lack()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.slow("graph", "server")
def test_a_reduced_model_is_served_as_it_computes(tmp_path: Path) -> None:
    images = tiny.images(24)
    np.save(tmp_path / "images.npy", images)
    save(tiny.checkpoint(), tmp_path / "dense")
    (tmp_path / "labels.txt").write_text("".join(f"class {index}\n" for index in range(7)))
    model = ["--model", tmp_path / "dense"]
    invoked("calibrate", *model, "--images", tmp_path / "images.npy", "-o", tmp_path / "m.safetensors")
    words = ["--moments", tmp_path / "m.safetensors", "--mlp", 0.5, "--attn", 0.5, "--align", "head=8"]
    invoked("reduce", *model, *words, "-o", tmp_path / "reduced")
    invoked("export", "--model", tmp_path / "reduced", "-o", tmp_path / "reduced" / "model.onnx")
    repository = tmp_path / "repository"
    invoked("package", tmp_path, "-o", repository, "--name", "tiny", "--labels", tmp_path / "labels.txt")
    invoked("package", "lint", repository)
    with torch.inference_mode():
        expected = corp_deploy.load(tmp_path / "reduced")(torch.from_numpy(images)).numpy()
    (tmp_path / "server").mkdir()
    with Server(repository, tmp_path / "server") as server:
        assert server.load("tiny_cpu") is None
        run_clients(server, "tiny_cpu", tmp_path / "images.npy", tmp_path / "answers.npz")
    assert server.exit_code == 0
    with np.load(tmp_path / "answers.npz") as opened:
        answers = dict(opened)
    np.testing.assert_allclose(answers["logits"], expected, rtol=1e-4, atol=1e-4)
    assert list(answers["labels"]) == [f"class {index}" for index in expected.argmax(1)]
