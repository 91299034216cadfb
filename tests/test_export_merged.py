"""Models that merge tokens as graphs and as an engine: torch's outputs at any batch, no Scatter, attention fused."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from corp_deploy.families import timm_vit as vit
from corp_deploy.families.family import family_of
from corp_deploy.families.merging import Merging
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from export.graph.to_onnx import onnx_from_model, save
from tests.tiny import checkpoint, images

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "merged": ({}, {}),
    "unmerged by keys": ({"global_pool": "avg", "class_token": False}, {"metric": "keys"}),
    "dropped": ({}, {"how": "drop"}),
}


@cache
def model_of(way: str) -> nn.Module:
    kwargs, options = WAYS[way]
    return vit.with_merging(checkpoint(**kwargs).model, Merging(schedule=(3, 4), **options))


@cache
def graph(way: str, precision: str = "fp32") -> onnx.ModelProto:
    model = model_of(way)
    ports = vit.input_spec(model).ports, vit.output_ports(model)
    return onnx_from_model(family_of(model).exportable(model), *ports, precision=precision, metadata={})


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("way", "precision", "bound"), [*((way, "fp32", 1e-5) for way in WAYS), ("merged", "fp16", 5e-3)]
)
def test_a_graph_gives_torchs_outputs_at_any_batch(way: str, precision: str, bound: float) -> None:
    proto = graph(way, precision)
    assert not {node.op_type for node in proto.graph.node} & {"ScatterElements", "ScatterND", "NonZero", "If", "Loop"}
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for count in (1, 5):
        pixels = images(count, seed=count)
        with torch.inference_mode():
            expected = model_of(way)(torch.from_numpy(pixels)).numpy()
        (got,) = session.run(None, {"images": pixels})
        assert np.linalg.norm(got - expected) < bound * np.linalg.norm(expected)


@pytest.mark.slow("graph")
def test_of_equal_tokens_graph_and_torch_take_the_same() -> None:
    """Images of one colour: all patches but their positions are alike, most similarities tie or nearly do."""
    model = vit.with_merging(checkpoint(pos_embed="none").model, Merging(schedule=(3, 4)))
    ports = vit.input_spec(model).ports, vit.output_ports(model)
    proto = onnx_from_model(family_of(model).exportable(model), *ports, precision="fp32", metadata={})
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    pixels = np.full((2, 3, 32, 32), 0.3, np.float32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(pixels)).numpy()
    np.testing.assert_allclose(session.run(None, {"images": pixels})[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow("graph", "engine")
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt-rtx is not installed (pip install tensorrt-rtx), so no engine can be built here",
)
@pytest.mark.parametrize("way", ["merged", "dropped"])
def test_an_engine_keeps_every_fused_attention(tmp_path: Path, way: str) -> None:
    path = tmp_path / "merged.onnx"
    save(graph(way, "fp16"), path)
    options = BuildOptions(backend="tensorrt-rtx", profiles=(BatchProfile.from_text("1:8:16"),), sms=("86",))
    record = build_engine(path, options).record
    assert record.attention_sites == record.fused_attention_sites == ("blocks.0.attn", "blocks.1.attn")
