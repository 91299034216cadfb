"""Models that merge tokens as graphs and as an engine: torch's outputs at any batch, no Scatter, attention fused."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.traced.models.merging import Merging
from export.graph.to_onnx import onnx_from_model, save
from tests.graphs import built, needs_rtx, require_as_torch, session_of
from tests.tiny import checkpoint, images

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "merged": ({}, {}),
    "unmerged by keys": ({"global_pool": "avg", "class_token": False}, {"metric": "keys"}),
    "attended": ({}, {"metric": "attended"}),
    "dropped": ({}, {"how": "drop"}),
}


@cache
def model_of(way: str) -> nn.Module:
    kwargs, options = WAYS[way]
    return traced_model.with_merging(checkpoint(**kwargs).model, Merging(schedule=(3, 4), **options))


@cache
def graph(way: str, precision: str = "fp32") -> onnx.ModelProto:
    model = model_of(way)
    ports = traced_model.input_spec(model).ports, traced_model.output_ports(model)
    return onnx_from_model(traced_model.exportable(model), *ports, precision=precision, metadata={})


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("way", "precision", "bound"), [*((way, "fp32", 1e-5) for way in WAYS), ("merged", "fp16", 5e-3)]
)
def test_a_graph_gives_torchs_outputs_at_any_batch(way: str, precision: str, bound: float) -> None:
    proto = graph(way, precision)
    assert not {node.op_type for node in proto.graph.node} & {"ScatterElements", "ScatterND", "NonZero", "If", "Loop"}

    def asked(count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        pixels = images(count, seed=count)
        with torch.inference_mode():
            return pixels, model_of(way)(torch.from_numpy(pixels)).numpy()

    require_as_torch(proto, asked, bound)


@pytest.mark.slow("graph")
def test_of_equal_tokens_graph_and_torch_take_the_same() -> None:
    """Images of one colour: all patches but their positions are alike, most similarities tie or nearly do."""
    model = traced_model.with_merging(checkpoint(pos_embed="none").model, Merging(schedule=(3, 4)))
    ports = traced_model.input_spec(model).ports, traced_model.output_ports(model)
    proto = onnx_from_model(traced_model.exportable(model), *ports, precision="fp32", metadata={})
    pixels = np.full((2, 3, 32, 32), 0.3, np.float32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(pixels)).numpy()
    np.testing.assert_allclose(session_of(proto).run(None, {"images": pixels})[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow("graph", "engine")
@needs_rtx
@pytest.mark.parametrize("way", ["merged", "dropped"])
def test_an_engine_keeps_every_fused_attention(tmp_path: Path, way: str) -> None:
    path = tmp_path / "merged.onnx"
    save(graph(way, "fp16"), path)
    record = built(path, "1:8:16")
    assert record.attention_sites == record.fused_attention_sites == ("blocks.0.attn", "blocks.1.attn")
