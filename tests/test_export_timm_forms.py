"""Every form of timm's VisionTransformer as ONNX, and some as engines: torch's outputs, attention fused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from corp_deploy.families.family import input_ports, output_ports, sites_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from tests import tiny
from tests.graphs import built, needs_rtx, require_as_torch, session_of
from tests.vit_forms import REDUCED, checkpoint, method, opened

PRECISIONS = (("fp32", 1e-4), ("fp16", 2e-2))
HALF = ("packed gate", "gate apart", "q/k norm", "side by side")
"""Forms that are exported in half precision, too."""
PLAIN = ("mean", "maximum", "mean and maximum", "no classes", "registers", "any image size", "layer scale")
"""Forms whose graph has nothing that another's has not; the other tests of graphs have them too."""


def reduced(dense: Checkpoint) -> nn.Module:
    taken = calibrate(dense, opened(dense.model, 8), batch_size=8)
    return reduce(dense.model, taken, method()).model


@pytest.mark.slow("graph")
@pytest.mark.parametrize("form", [form for form in REDUCED if form not in PLAIN])
def test_graphs_give_what_torch_gives(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form, depth=1)
    narrower = reduced(dense)
    whole = Checkpoint(model=narrower, architecture=dense.architecture, lineage={})

    def asked(count: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        pixels = tiny.images(count, seed=4, size=input_ports(narrower)[0].shape[-1])
        with torch.inference_mode():
            return pixels, narrower(torch.from_numpy(pixels)).double().numpy()

    for precision, limit in PRECISIONS if form in HALF else PRECISIONS[:1]:
        export_checkpoint(whole, tmp_path / f"{precision}.onnx", precision=precision)
        require_as_torch(tmp_path / f"{precision}.onnx", asked, limit, (1, 3))
    given = session_of(tmp_path / "fp32.onnx").get_outputs()
    assert [port.name for port in output_ports(narrower)] == [each.name for each in given]


@pytest.mark.slow("graph", "engine")
@needs_rtx
@pytest.mark.parametrize("form", ["packed gate", "gate apart", "residual post-norm", "side by side"])
def test_attention_stays_fused(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form, depth=1)
    narrower = reduced(dense)
    whole = Checkpoint(model=narrower, architecture=dense.architecture, lineage={})
    export_checkpoint(whole, tmp_path / "m.onnx", precision="fp16")
    record = built(tmp_path / "m.onnx", "1:2:4")
    assert set(record.fused_attention_sites or ()) == {site.name for site in sites_of(narrower).heads}
