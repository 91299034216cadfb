"""Hierarchies as graphs and engines: torch's outputs at any batch, attention fused as in the dense model."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from calib.collect import collect
from corp_deploy.families.family import listened, sites_of
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.inputs import model_digest, preprocessing_text
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.sites import calibration_taps
from tests.graphs import audited, needs_rtx, require_as_torch
from tests.hierarchies import checkpoint, pixels
from tests.small_models import outputs

PRECISIONS = {"hiera": "fp16", "maxvit_tf": "fp32", "tiny_vit": "fp32"}
BOUNDS = {"fp32": 1e-5, "fp16": 5e-3}


@cache
def reduced(form: str) -> Checkpoint:
    """Half of everything."""
    model = checkpoint(form).model
    lineage = {"model": model_digest(model), "preprocessing": preprocessing_text(model)}
    taps = calibration_taps(model, sites_of(model))
    moments = collect(listened(model), taps, [pixels(model, 8)], device="cpu", lineage=lineage)
    half = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
    method = method_from_preset("best", **half, geometry="padded")
    narrower = reduce(model, moments, method).model
    return Checkpoint(model=narrower, architecture=checkpoint(form).architecture, lineage={})


@pytest.mark.slow("graph")
@pytest.mark.parametrize("form", PRECISIONS)
def test_a_graph_gives_torchs_outputs_at_any_batch(form: str, tmp_path: Path) -> None:
    export_checkpoint(reduced(form), tmp_path / "model.onnx", precision=PRECISIONS[form])
    model = reduced(form).model

    def asked(count: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        images = pixels(model, count, seed=count)
        return images.numpy(), outputs(model, images).numpy()

    require_as_torch(tmp_path / "model.onnx", asked, BOUNDS[PRECISIONS[form]])


@pytest.mark.slow("graph", "engine")
@needs_rtx
def test_attention_is_fused_in_the_dense_and_in_the_reduced_engine(tmp_path: Path) -> None:
    """In mask units, of pooled queries, and of all tokens."""
    export_checkpoint(checkpoint("hiera"), tmp_path / "dense.onnx", precision="fp16")
    export_checkpoint(reduced("hiera"), tmp_path / "reduced.onnx", precision="fp16")
    audit = audited(tmp_path / "dense.onnx", tmp_path / "reduced.onnx")
    assert audit.passed
    every = sites_of(checkpoint("hiera").model).every
    sites = {site.name.removesuffix(".qk") for site in every if site.name.endswith(".qk")}
    assert set(audit.dense.fusion.fused_sites) == set(audit.reduced.fusion.fused_sites) == sites
