"""Graphs of other tools, with their own names, a fixed batch or half-precision inputs."""

import onnx
import pytest
from onnx import TensorProto, helper

from export.graph.check import check_onnx


def graph(
    *, name: str = "pixel_values", batch: str | int = "batch_size", side: str | int = 8, kind: int = 1, note: str = ""
) -> onnx.ModelProto:
    images = helper.make_tensor_value_info(name, kind, [batch, 3, side, 8])
    scores = helper.make_tensor_value_info("scores", kind, [batch, 3, 1, 1])
    node = helper.make_node("GlobalAveragePool", [name], ["scores"])
    made = helper.make_model(
        helper.make_graph([node], "theirs", [images], [scores]), opset_imports=[helper.make_opsetid("", 18)]
    )
    made.ir_version = 9
    if note:
        helper.set_model_props(made, {"export.precision": note})
    return made


@pytest.mark.parametrize(
    "theirs",
    [graph(), graph(name="input.1", batch=1), graph(kind=TensorProto.FLOAT16)],
    ids=["own names", "fixed batch", "half inputs"],
)
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_graph_of_another_tool_is_accepted_with_any_names(theirs: onnx.ModelProto, backend: str) -> None:
    assert check_onnx(theirs, backend=backend) == []


def test_dynamic_size_is_refused_with_a_remedy() -> None:
    (reason,) = check_onnx(graph(side="height"))
    assert "pixel_values must have a fixed size behind the batch" in reason
    assert "make_dynamic_shape_fixed" in reason
    assert any("expected one input named 'images'" in each for each in check_onnx(graph(note="fp32")))
