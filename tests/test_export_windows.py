"""Attention in windows as graphs and engines: torch's outputs at any batch, attention fused as in the dense model."""

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from calib.collect import collect
from corp_deploy.families.family import sites_of
from corp_deploy.families.sites import calibration_taps
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.inputs import model_digest, preprocessing_text
from corp_deploy.store.onnx_file import export_checkpoint
from export.engine.audit import audit_fusion
from export.engine.options import BatchProfile
from tests.small_models import outputs
from tests.windowed_models import checkpoint, pixels

DEPTHS = {"windows": (2, 1), "cosines": (1, 1)}  # a shifted block, padding


@cache
def dense(form: str) -> Checkpoint:
    return checkpoint(form, depths=DEPTHS[form])


@cache
def reduced(form: str) -> Checkpoint:
    """Half of everything."""
    model = dense(form).model
    lineage = {"model": model_digest(model), "preprocessing": preprocessing_text(model)}
    moments = collect(
        model, calibration_taps(model, sites_of(model)), [pixels(model, 8)], device="cpu", lineage=lineage
    )
    half = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
    method = method_from_preset("best", **half, geometry="square" if form == "cosines" else "padded")
    narrower = reduce(model, moments, method).model
    return Checkpoint(model=narrower, architecture=dense(form).architecture, lineage={})


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows in half precision, dense and reduced, and padded ones of cosine attention in single precision."""
    directory = tmp_path_factory.mktemp("graphs")
    export_checkpoint(dense("windows"), directory / "dense.onnx", precision="fp16")
    export_checkpoint(reduced("windows"), directory / "windows.onnx", precision="fp16")
    export_checkpoint(reduced("cosines"), directory / "cosines.onnx", precision="fp32")
    return directory


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("form", "bound"), [("windows", 5e-3), ("cosines", 1e-5)])
def test_a_graph_gives_torchs_outputs_at_any_batch(form: str, bound: float, graphs: Path) -> None:
    model = reduced(form).model
    session = ort.InferenceSession(graphs / f"{form}.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 5):
        images = pixels(model, count, seed=count)
        exact = outputs(model, images).numpy()
        (got,) = session.run(None, {"images": images.numpy()})
        assert np.linalg.norm(got - exact) < bound * np.linalg.norm(exact)


@pytest.mark.slow("engine")
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt-rtx is not installed (pip install tensorrt-rtx), so no engine can be built here",
)
def test_attention_is_fused_in_the_dense_and_in_the_reduced_engine(graphs: Path) -> None:
    batch = BatchProfile(smallest=1, tuned=4, largest=8)
    (audit,) = audit_fusion(graphs / "dense.onnx", graphs / "windows.onnx", batch=batch)
    assert audit.passed
    sites = {site.name for site in sites_of(dense("windows").model).heads}
    assert set(audit.dense.fusion.fused_sites) == set(audit.reduced.fusion.fused_sites) == sites
