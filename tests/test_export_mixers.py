"""Models without attention as graphs and engines: torch's outputs at any batch, and layers as timm has them."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from torch import nn

from calib.collect import collect
from corp_deploy.families import traced_model
from corp_deploy.families.family import listened, sites_of
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.inputs import model_digest, preprocessing_text
from corp_deploy.traced.models.sites import calibration_taps
from corp_deploy.views.engine import audit_table
from export.graph.to_onnx import onnx_from_model, save
from tests.graphs import audited, built, needs_rtx, require_as_torch
from tests.small_models import outputs, pixels, small

NAMES = ("convnext_atto", "convnext_tiny", "convnextv2_atto", "small_mixer", "small_resmlp")


@cache
def dense(name: str) -> nn.Module:
    return small(name).model


@cache
def reduced(name: str) -> nn.Module:
    """Half of every site's channels."""
    model = dense(name)
    lineage = {"model": model_digest(model), "preprocessing": preprocessing_text(model)}
    taps = calibration_taps(model, sites_of(model))
    moments = collect(listened(model), taps, [pixels(model, 8)], device="cpu", lineage=lineage)
    widths = {site.name: site.size // 2 for site in sites_of(model).every}
    return reduce(model, moments, method_from_preset("best", align_hidden=8), widths=widths).model


@cache
def graph(name: str, precision: str = "fp32", *, is_reduced: bool = True) -> onnx.ModelProto:
    model = reduced(name) if is_reduced else dense(name)
    ports = traced_model.input_spec(model).ports, traced_model.output_ports(model)
    return onnx_from_model(traced_model.exportable(model), *ports, precision=precision, metadata={})


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("name", "precision", "bound"),
    [
        *((name, "fp32", 1e-5) for name in NAMES),
        ("convnext_atto", "fp16", 5e-3),
        ("convnextv2_atto", "fp16", 5e-3),
        ("small_mixer", "fp16", 5e-3),
    ],
)
def test_a_graph_gives_torchs_outputs_at_any_batch(name: str, precision: str, bound: float) -> None:
    def asked(count: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        images = pixels(dense(name), count, seed=count)
        return images.numpy(), outputs(reduced(name), images).numpy()

    require_as_torch(graph(name, precision), asked, bound)


@pytest.mark.slow("graph")
def test_a_convnext_keeps_the_layers_that_it_has_in_timm() -> None:
    def count(name: str, kind: str) -> int:
        return sum(node.op_type == kind for node in graph(name).graph.node)

    # A stem, three downsamplings, and of each of five blocks a depthwise convolution, the MLP's two layers being
    # convolutions or matrix products.
    assert count("convnext_atto", "Conv") == 1 + 3 + 5 + 2 * 5
    assert count("convnext_tiny", "Conv") == 1 + 3 + 5


@pytest.mark.slow("graph", "engine")
@needs_rtx
def test_an_engine_is_built_and_an_audit_finds_no_attention(tmp_path: Path) -> None:
    for kind, is_reduced in (("dense", False), ("reduced", True)):
        save(graph("small_mixer", "fp16", is_reduced=is_reduced), tmp_path / f"{kind}.onnx")
    record = built(tmp_path / "reduced.onnx", "1:4:8")
    assert (record.attention_sites, record.half_weight_share) == ((), 1.0)
    audit = audited(tmp_path / "dense.onnx", tmp_path / "reduced.onnx")
    assert audit.passed
    assert not audit.lost
    assert audit_table([audit]).columns[1]._cells == ["-"]
