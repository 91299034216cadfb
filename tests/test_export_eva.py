"""timm's Eva as ONNX and as engines: torch's outputs, angles as constants, attention fused."""

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from corp_deploy.store.onnx_file import export_checkpoint
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from tests import tiny
from tests.eva_models import shallow
from tests.small_models import outputs

HALF = ("halves turned, registers",)
"""Forms that are exported in half precision, too."""
PRECISIONS = (("fp32", 1e-4), ("fp16", 2e-2))


def refuse_computed_positions(path: Path) -> None:
    """Angles are constants of the graph."""
    kinds = {node.op_type for node in onnx.load(str(path)).graph.node}
    assert not kinds & {"Sin", "Cos", "If", "Range", "Tile", "Loop"}, kinds


@pytest.mark.slow("graph")
@pytest.mark.parametrize("form", ["halves turned, registers", "q/k norm, groups"])
def test_graphs_give_what_torch_gives(form: str, tmp_path: Path) -> None:
    model = shallow(form)
    for precision, limit in PRECISIONS if form in HALF else PRECISIONS[:1]:
        path = tmp_path / f"{precision}.onnx"
        export_checkpoint(model, path, precision=precision)
        refuse_computed_positions(path)
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        for count in (1, 3):
            pixels = tiny.images(count, 3)
            exact = outputs(model.model, torch.from_numpy(pixels)).numpy()
            (out,) = session.run(None, {session.get_inputs()[0].name: pixels})
            assert np.linalg.norm(out.astype(np.float64) - exact) < limit * np.linalg.norm(exact), precision


@pytest.mark.slow("graph", "engine")
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt-rtx is not installed (pip install tensorrt-rtx), so no engine can be built here",
)
@pytest.mark.parametrize("form", ["neighbours turned, packed gate"])
def test_attention_stays_fused(form: str, tmp_path: Path) -> None:
    model = shallow(form)
    export_checkpoint(model, tmp_path / "m.onnx", precision="fp16")
    options = BuildOptions(backend="tensorrt-rtx", profiles=(BatchProfile.from_text("1:2:4"),), sms=("86",))
    record = build_engine(tmp_path / "m.onnx", options).record
    assert record.fused_attention_sites == ("blocks.0.attn",)
