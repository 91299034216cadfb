"""Models that merge tokens as graphs, engines and in a real server: outputs as in torch, and fused attention."""

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
from corp_deploy.families.inspection import merge_margins
from corp_deploy.spec.merging import Merging
from export.graph.to_onnx import onnx_from_model, save_onnx
from export.triton.config import Serving
from export.triton.lint import lint_repository
from export.triton.repository import write_repository
from export.triton.variants import Package
from tests.doubles import some
from tests.graphs import built, needs_rtx, require_as_torch, session_of
from tests.timm_models import pixels
from tests.tiny import checkpoint, images, ran
from tests.triton_server import Server, lack

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
    return graph_of(model_of(way), precision)


def graph_of(model: nn.Module, precision: str = "fp32") -> onnx.ModelProto:
    ports = traced_model.input_spec(model).ports, traced_model.output_ports(model)
    return onnx_from_model(traced_model.exportable(model), *ports, precision=precision, metadata={})


def require_merged_graph(proto: onnx.ModelProto, model: nn.Module, bound: float) -> None:
    """Require operations that engines have, and outputs as in torch at any batch."""
    assert not {node.op_type for node in proto.graph.node} & {"ScatterElements", "ScatterND", "NonZero", "If", "Loop"}

    def asked(count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        shown = pixels(model, count, count)
        return shown.numpy(), ran(model, shown).numpy()

    require_as_torch(proto, asked, bound)


def fused_sites(path: Path, model: nn.Module) -> tuple[str, ...] | None:
    """Return the attentions that a model's engine fuses."""
    save_onnx(graph_of(model, "fp16"), path)
    return built(path, "1:8:16").fused_attention_sites


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("way", "precision", "bound"), [*((way, "fp32", 1e-5) for way in WAYS), ("merged", "fp16", 5e-3)]
)
def test_merged_graph_equals_torch_at_any_batch(way: str, precision: str, bound: float) -> None:
    require_merged_graph(graph(way, precision), model_of(way), bound)


@pytest.mark.slow("graph")
def test_graph_and_torch_break_ties_of_equal_tokens_alike() -> None:
    """Patches of images of one colour are equal, so that most similarities tie or nearly tie."""
    model = traced_model.with_merging(checkpoint(pos_embed="none").model, Merging(schedule=(3, 4)))
    plain = np.full((2, 3, 32, 32), 0.3, np.float32)
    (logits,) = session_of(graph_of(model)).run(None, {"images": plain})
    np.testing.assert_allclose(logits, ran(model, plain).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow("graph", "engine")
@needs_rtx
@pytest.mark.parametrize("way", ["merged", "dropped"])
def test_merged_engine_keeps_every_fused_attention(tmp_path: Path, way: str) -> None:
    path = tmp_path / "merged.onnx"
    save_onnx(graph(way, "fp16"), path)
    record = built(path, "1:8:16")
    assert record.attention_sites == record.fused_attention_sites == ("blocks.0.attn", "blocks.1.attn")


@pytest.mark.skipif(lack() is not None, reason=str(lack()))
@pytest.mark.slow("graph", "server")
def test_served_merged_and_dropped_tokens_equal_torch(tmp_path: Path) -> None:
    repository, ways = tmp_path / "models", ("merged", "dropped")
    for way in ways:
        save_onnx(graph(way), tmp_path / f"{way}.onnx")
        serving = Serving(preferred_batches=(2,), max_batch=4, cpu_threads=1)
        labels = tuple(f"kind {index}" for index in range(7))
        package = Package(name=way, cpu_onnx=tmp_path / f"{way}.onnx", labels=labels, serving=serving)
        write_repository(package, repository)
    assert lint_repository(repository) == ()
    shown = torch.from_numpy(images(3))
    with Server(repository, tmp_path) as server:
        for way in ways:
            margins = merge_margins(model_of(way), shown)
            assert float(some(margins).min()) > 1e-5, "rounding can't merge other tokens of these images"
            assert server.load(f"{way}_cpu") is None
            feed = {"name": "images", "datatype": "FP32", "shape": [*shown.shape], "data": shown.flatten().tolist()}
            status, answer = server.ask(f"models/{way}_cpu/infer", post=True, content={"inputs": [feed]})
            assert status == 200, answer
            (logits,) = (output for output in answer["outputs"] if output["name"] == "logits")
            served = np.asarray(logits["data"]).reshape(logits["shape"])
            np.testing.assert_allclose(served, ran(model_of(way), shown).numpy(), rtol=0, atol=1e-4)
