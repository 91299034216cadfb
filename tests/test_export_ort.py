"""ONNX Runtime artefacts give the outputs of their graphs and are recorded like engines."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export.engine.build import build_ort_artifact, write_engine
from export.engine.record import record_of_plan, sha256_of
from export.graph.to_onnx import save_onnx
from ground.errors import Missing
from tests.export_vit import Vit, export
from tests.graphs import session_of
from tests.refusals import rejects


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    for precision in ("fp32", "fp16"):
        save_onnx(export(Vit(depth=1), precision), folder / f"{precision}.onnx")
    return folder


def test_optimised_graph_gives_equal_logits_with_fewer_nodes(folder: Path, tmp_path: Path) -> None:
    source = folder / "fp32.onnx"
    engine = build_ort_artifact(source, command="build fp32.onnx")
    write_engine(engine, tmp_path / "model.ort.onnx")
    images = np.random.default_rng(0).standard_normal((3, 3, 32, 32)).astype(np.float32)
    logits = [session_of(path).run(None, {"images": images})[0] for path in (source, tmp_path / "model.ort.onnx")]
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    record = record_of_plan(tmp_path / "model.ort.onnx")
    assert record == engine.record
    assert (record.backend, record.targets, record.precision) == ("onnxruntime", ("cpu",), "fp32")
    assert (record.onnx_sha256, record.command) == (sha256_of(source.read_bytes()), "build fp32.onnx")
    assert record.kernels == len(onnx.load(tmp_path / "model.ort.onnx").graph.node)
    assert record.kernels < len(onnx.load(source).graph.node)
    assert (record.attention_sites, record.fused_attention) == (("blocks.0.attn",), 0)


def test_fp16_graphs_for_the_cpu_are_refused_and_cuda_is_missing(folder: Path) -> None:
    rejects("CPU kernels compute in float32 and this graph is fp16", build_ort_artifact, folder / "fp16.onnx")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        with pytest.raises(Missing, match=r"pip install onnxruntime-gpu(.|\n)*build x --device cuda"):
            build_ort_artifact(folder / "fp16.onnx", device="cuda", command="build x --device cuda")
