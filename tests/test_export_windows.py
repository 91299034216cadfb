"""Attention with biases of places as graphs and engines: torch's outputs at any batch, attention fused as in the dense
model.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from tests import biased_models
from tests.biased_models import opened, pixels
from tests.graphs import audited, needs_rtx, require_as_torch
from tests.small_models import outputs
from tests.vit_forms import method

SHALLOW = {"windows": {"depths": (2, 1)}, "cosines": {"depths": (1, 1)}}  # a shifted block, padding


@cache
def dense(form: str) -> Checkpoint:
    return biased_models.checkpoint(form, **SHALLOW.get(form, {"depth": 1}))


@cache
def reduced(form: str) -> Checkpoint:
    """Half of everything."""
    taken = calibrate(dense(form), opened(dense(form).model, 8), batch_size=8)
    asked = method(geometry="square" if form == "cosines" else "padded")
    return replace(dense(form), model=reduce(dense(form).model, taken, asked).model)


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("form", "precision", "bound"),
    [("windows", "fp16", 5e-3), ("cosines", "fp32", 1e-5), ("networks", "fp16", 2e-2), ("talking heads", "fp32", 1e-4)],
)
def test_a_graph_gives_torchs_outputs_at_any_batch(form: str, precision: str, bound: float, tmp_path: Path) -> None:
    model = reduced(form).model
    export_checkpoint(reduced(form), tmp_path / "m.onnx", precision=precision)

    def asked(count: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        images = pixels(model, count, seed=count)
        return images.numpy(), outputs(model, images).numpy()

    require_as_torch(tmp_path / "m.onnx", asked, bound)


@pytest.mark.slow("graph", "engine")
@needs_rtx
@pytest.mark.parametrize(("form", "attentions"), [("windows", 3), ("tables", 1)])
def test_attention_is_fused_in_the_dense_and_in_the_reduced_engine(form: str, attentions: int, tmp_path: Path) -> None:
    for name, each in (("dense", dense(form)), ("half", reduced(form))):
        export_checkpoint(each, tmp_path / f"{name}.onnx", precision="fp16")
    audit = audited(tmp_path / "dense.onnx", tmp_path / "half.onnx")
    assert audit.passed
    fused = set(audit.dense.fusion.fused_sites)
    assert set(audit.reduced.fusion.fused_sites) == fused
    assert len(fused) == attentions
