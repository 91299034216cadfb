"""timm's Eva as ONNX and as engines: torch's outputs, angles as constants, attention fused."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from corp_deploy.store.onnx_file import export_checkpoint
from tests import tiny
from tests.eva_models import shallow
from tests.graphs import built, needs_rtx, require_as_torch
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

    def asked(count: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        pixels = tiny.images(count, 3)
        return pixels, outputs(model.model, torch.from_numpy(pixels)).numpy()

    for precision, limit in PRECISIONS if form in HALF else PRECISIONS[:1]:
        path = tmp_path / f"{precision}.onnx"
        export_checkpoint(model, path, precision=precision)
        refuse_computed_positions(path)
        require_as_torch(path, asked, limit, (1, 3))


@pytest.mark.slow("graph", "engine")
@needs_rtx
@pytest.mark.parametrize("form", ["neighbours turned, packed gate"])
def test_attention_stays_fused(form: str, tmp_path: Path) -> None:
    model = shallow(form)
    export_checkpoint(model, tmp_path / "m.onnx", precision="fp16")
    assert built(tmp_path / "m.onnx", "1:2:4").fused_attention_sites == ("blocks.0.attn",)
