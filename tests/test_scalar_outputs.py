"""Outputs of one number for each input, [B], through to a server's repository."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.planning.curvature import join_outputs
from corp_deploy.polish.held_out import relative_square
from corp_deploy.store.module_model import checkpoint_from_module
from export.graph.check import check_onnx
from export.graph.to_onnx import onnx_from_model, save_onnx
from export.triton.lint import lint_repository
from export.triton.repository import write_repository
from export.triton.variants import Package


class Scores(nn.Module):
    """One score of an image, with logits beside it or alone."""

    input_size = (3, 8, 8)

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.cut, self.one, self.five = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 1), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        x = self.cut(images).relu().flatten(1)
        score: Tensor = self.one(x).squeeze(1)
        return score if self.kind == "alone" else {"score": score, "logits": self.five(x)}


@pytest.mark.parametrize("kind", ["alone", "beside"])
def test_output_of_one_number_is_exported_and_served(kind: str, tmp_path: Path) -> None:
    module = Scores(kind).eval()
    model = checkpoint_from_module(module).model
    assert {port.role for port in output_ports(model)} == {"logits"}
    assert traced_model.classes(model) == 1
    images = torch.randn(3, 3, 8, 8)
    proto = onnx_from_model(model, input_ports(model), output_ports(model), precision="fp32", metadata={})
    session = ort.InferenceSession(proto.SerializeToString())
    given = session.run(None, {"images": images.numpy()})
    expected = module(images)
    tensors = list(expected.values()) if isinstance(expected, dict) else [expected]
    for own, theirs in zip(given, tensors, strict=True):
        np.testing.assert_allclose(own, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)
    save_onnx(proto, tmp_path / "model.onnx")
    write_repository(Package(name="net", cpu_onnx=tmp_path / "model.onnx"), tmp_path / "repo")
    config = tmp_path / "repo" / "net_cpu" / "config.pbtxt"
    described = "dims: [1]\n  reshape {\n    shape: []\n  }\n"
    assert described in config.read_text()
    assert lint_repository(tmp_path / "repo") == ()
    config.write_text(config.read_text().replace(described, "dims: []\n"))
    assert "dims: [1] and reshape" in lint_repository(tmp_path / "repo")[0].remedy


def test_batch_of_graph_without_sizes_is_refused() -> None:
    value = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [])
    images = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 3, 8, 8])
    node = onnx.helper.make_node("ReduceMean", ["images"], ["logits"], keepdims=0)
    graph = onnx.helper.make_graph([node], "g", [images], [value])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    reasons = check_onnx(proto, precision="fp32", backend="onnxruntime", inputs=None, outputs=None)
    assert any("logits must have a batch in front" in reason for reason in reasons)


def test_scalar_output_has_an_error_per_input() -> None:
    assert float(relative_square(torch.tensor([2.0, 2.0]), torch.tensor([1.0, 2.0]))) == 0.5


def test_several_scalar_outputs_are_judged() -> None:
    assert join_outputs([torch.ones(4), torch.ones(4, 3)]).shape == (4, 4)
