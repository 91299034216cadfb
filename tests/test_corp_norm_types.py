"""Exports of timm's norms in 16 bits: each mean is computed in float32, and an RmsNorm is one operator."""

import numpy as np
import pytest
import torch
from onnx import TensorProto
from timm.layers import RmsNorm, RmsNorm2d, SimpleNorm
from torch import Tensor, nn

from corp_deploy.families.timm_library import NORMS
from perf.parity.block_outputs import outputs_of_graph
from tests import tiny
from tests.export_vit import export, input_types

MEANS = ("ReduceMean", "RMSNormalization", "LayerNormalization", "InstanceNormalization", "Sqrt")
BOUNDS = {"fp16": 2e-3, "bf16": 1.6e-2}


class OneNorm(nn.Module):
    """A convolution, a norm of tokens or of maps, and a head; the norm's mean of squares overflows float16."""

    def __init__(self, norm: nn.Module, *, maps: bool) -> None:
        super().__init__()
        self.stem, self.norm, self.head, self.maps = nn.Conv2d(3, 16, 4, 4), norm, nn.Linear(16, 5), maps

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images) * 1000
        x = self.norm(x).flatten(2).mT if self.maps else self.norm(x.flatten(2).mT)
        logits: Tensor = self.head(x[:, 3])
        return logits


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("norm", "precision"),
    [(RmsNorm(16), "fp16"), (RmsNorm(16), "bf16"), (SimpleNorm(16), "fp16"), (RmsNorm2d(16), "fp16")],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_norm_computes_its_mean_in_float32(norm: nn.Module, precision: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    model, images = OneNorm(norm, maps=isinstance(norm, RmsNorm2d)).eval(), tiny.images(8)
    graph = export(model, precision, norms=NORMS)
    assert input_types(graph, *MEANS) == {TensorProto.FLOAT}
    rms_nodes = [node for node in graph.graph.node if node.op_type == "RMSNormalization"]
    assert len(rms_nodes) == isinstance(norm, RmsNorm)
    with torch.inference_mode():
        exact = model.double()(torch.from_numpy(images).double()).numpy()
    found = outputs_of_graph(graph, {"images": images})["head"]
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < BOUNDS[precision]
