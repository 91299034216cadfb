"""A model that merges tokens in a real inference server: its graph alone, packaged, loaded and asked over HTTP."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.merge_margins import merge_margins
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.merging import How, Merging
from export.triton.config import Serving
from export.triton.lint import lint_repository
from export.triton.repository import write_repository
from export.triton.variants import Package
from tests import tiny
from tests.triton_server import Server, lack

REASON = lack()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.slow("graph", "server")
def test_merged_and_dropped_tokens_are_served_as_torch_answers(tmp_path: Path) -> None:
    dense, repository = tiny.checkpoint(), tmp_path / "models"
    ways: tuple[How, ...] = ("merge", "drop")
    models: dict[How, nn.Module] = {}
    for how in ways:
        models[how] = traced_model.with_merging(dense.model, Merging(schedule=(2, 4), how=how))
        graph = tmp_path / f"{how}.onnx"
        export_checkpoint(
            Checkpoint(model=models[how], architecture=dense.architecture, lineage={}), graph, precision="fp32"
        )
        serving = Serving(preferred_batches=(2,), max_batch=4, cpu_threads=1)
        labels = tuple(f"kind {index}" for index in range(7))
        write_repository(Package(name=how, cpu_onnx=graph, labels=labels, serving=serving), repository)
    assert lint_repository(repository) == ()
    images = torch.from_numpy(tiny.images(3))
    with Server(repository, tmp_path) as server:
        for how, model in models.items():
            margins = merge_margins(model, images)
            assert margins is not None
            assert float(margins.min()) > 1e-5, "images on which rounding merges no other tokens"
            assert server.load(f"{how}_cpu") is None
            data = images.flatten().tolist()
            feed = {"name": "images", "datatype": "FP32", "shape": list(images.shape), "data": data}
            status, answer = server.ask(f"models/{how}_cpu/infer", post=True, content={"inputs": [feed]})
            assert status == 200, answer
            (logits,) = (output for output in answer["outputs"] if output["name"] == "logits")
            with torch.inference_mode():
                expected = model(images).numpy()
            given = np.asarray(logits["data"]).reshape(logits["shape"])
            np.testing.assert_allclose(given, expected, rtol=0, atol=1e-4)
