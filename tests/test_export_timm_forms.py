"""Every form of timm's VisionTransformer as ONNX, and some as engines: torch's outputs, attention fused."""

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from torch import nn

from corp_deploy.families.family import output_ports, sites_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from tests.small_models import outputs, pixels
from tests.vit_forms import FORMS, checkpoint, method, opened

PRECISIONS = (("fp32", 1e-4), ("fp16", 2e-2))
HALF = ("packed gate", "gate apart", "q/k norm", "side by side")
"""Forms that are exported in half precision, too."""
PLAIN = ("mean", "maximum", "mean and maximum", "no classes", "registers", "any image size", "layer scale")
"""Forms whose graph has nothing that another's has not; the other tests of graphs have them too."""


def reduced(dense: Checkpoint) -> nn.Module:
    taken = calibrate(dense, opened(dense.model, 8), batch_size=8)
    return reduce(dense.model, taken, method()).model


@pytest.mark.slow("graph")
@pytest.mark.parametrize("form", [form for form in FORMS if form not in PLAIN])
def test_graphs_give_what_torch_gives(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form, depth=1)
    narrower = reduced(dense)
    whole = Checkpoint(model=narrower, architecture=dense.architecture, lineage={})
    for precision, limit in PRECISIONS if form in HALF else PRECISIONS[:1]:
        export_checkpoint(whole, tmp_path / f"{precision}.onnx", precision=precision)
        session = ort.InferenceSession(tmp_path / f"{precision}.onnx", providers=["CPUExecutionProvider"])
        (port,) = session.get_inputs()
        for count in (1, 3):
            images = pixels(narrower, count, seed=4)
            feed = images.numpy().astype(np.float16 if "float16" in port.type else np.float32)
            (out,) = session.run(None, {port.name: feed})
            exact = outputs(narrower, images)
            assert np.linalg.norm(out.astype(np.float64) - exact.numpy()) < limit * float(exact.norm()), precision
    assert [port.name for port in output_ports(narrower)] == [each.name for each in session.get_outputs()]


@pytest.mark.slow("graph", "engine")
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt-rtx is not installed (pip install tensorrt-rtx), so no engine can be built here",
)
@pytest.mark.parametrize("form", ["packed gate", "gate apart", "residual post-norm", "side by side"])
def test_attention_stays_fused(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form, depth=1)
    narrower = reduced(dense)
    whole = Checkpoint(model=narrower, architecture=dense.architecture, lineage={})
    export_checkpoint(whole, tmp_path / "m.onnx", precision="fp16")
    options = BuildOptions(backend="tensorrt-rtx", profiles=(BatchProfile.from_text("1:2:4"),), sms=("86",))
    record = build_engine(tmp_path / "m.onnx", options).record
    attentions = {site.name.removesuffix(".v") for site in sites_of(narrower).every if site.name.endswith(".v")}
    assert set(record.fused_attention_sites or ()) == attentions
