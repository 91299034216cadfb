"""BF16 graphs: their types, the lowest operator set that takes them, and norms and softmax in float32."""

import copy
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from export.graph.check import check_onnx, unsupported_nodes
from export.graph.weights import weight_shares
from ground.ports import Port
from ground.precision import BFLOAT16, FLOAT16, FLOAT32, FloatType, precision_by_name, precision_of_shares
from tests.export_vit import Vit, export, input_types
from tests.graphs import graph_of
from tests.refusals import rejects


class Words(nn.Module):
    """One block of a text encoder, without any convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.fc1, self.act, self.fc2 = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        scores: Tensor = (x @ x.mT / 6).softmax(-1)
        logits: Tensor = self.head((scores @ x + self.fc2(self.act(self.fc1(x)))).mean(1))
        return logits


class Convolutions(nn.Module):
    """A convolution with its batch norm, a norm of feature maps, and pooling."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda dim: nn.GroupNorm(4, dim)) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Hardswish()
        self.norm, self.pool, self.head = norm(16), nn.MaxPool2d(2), nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.norm(self.act(self.bn(self.conv(images)))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@pytest.fixture(scope="module")
def vit() -> onnx.ModelProto:
    return export(Vit(depth=1), "bf16")


@pytest.mark.slow("graph")
def test_vit_is_bfloat16_except_ports_norms_and_softmax(vit: onnx.ModelProto) -> None:
    assert vit.opset_import[0].version == 22
    assert weight_shares(vit) == {"bfloat16": 1.0}
    assert check_onnx(vit, precision="bf16") == []
    assert input_types(vit, "MatMul", "Conv", "Gelu") == {TensorProto.BFLOAT16}
    assert input_types(vit, "Softmax", "LayerNormalization") == {TensorProto.FLOAT}
    assert {v.type.tensor_type.elem_type for v in (*vit.graph.input, *vit.graph.output)} == {TensorProto.FLOAT}


@pytest.mark.slow("graph")
def test_opset_without_bfloat16_conv_is_refused_by_name() -> None:
    rejects(r"Conv takes no bfloat16 before opset 22 \(first at patch/Conv\)", export, Vit(depth=1), "bf16", opset=20)
    assert export(Vit(depth=1), "bf16", opset=23).opset_import[0].version == 23


@pytest.mark.slow("graph")
def test_lowest_opset_suffices_without_a_convolution() -> None:
    proto = export(Words().eval(), "bf16", Port(name="tokens", shape=(7,), dtype="int64"))
    assert (proto.opset_import[0].version, weight_shares(proto)) == (20, {"bfloat16": 1.0})


@pytest.mark.slow("graph")
@pytest.mark.parametrize("norm", [lambda dim: nn.GroupNorm(4, dim), lambda dim: nn.InstanceNorm2d(dim, affine=True)])
def test_convolutional_network_is_bfloat16_throughout(norm: Callable[[int], nn.Module]) -> None:
    model = Convolutions(norm).eval()
    with torch.no_grad():
        model.bn.weight.uniform_(0.5, 2.0)
    proto = export(model, "bf16")
    assert proto.opset_import[0].version == 22
    assert weight_shares(proto) == {"bfloat16": 1.0}
    assert input_types(proto, "Conv") == {TensorProto.BFLOAT16}
    assert TensorProto.BFLOAT16 not in input_types(proto, "GroupNormalization", "InstanceNormalization")


@pytest.mark.slow("graph")
def test_mixed_keeps_chosen_modules_and_bfloat16_does_not_overflow() -> None:
    model = Vit(depth=2)
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.fc1.weight")[0, 0] = 1e6
    rejects(r"1e\+06, float16 ends at 65504; use precision mixed with", export, model, "fp16")
    assert weight_shares(export(model, "bf16")) == {"bfloat16": 1.0}
    proto = export(model, "mixed-bf16", keep_fp32=["blocks.1"])
    assert set(weight_shares(proto)) == {"bfloat16", "float32"}
    assert input_types(proto, "Gelu") == {TensorProto.BFLOAT16, TensorProto.FLOAT}
    assert check_onnx(proto) == []
    assert check_onnx(proto, precision="mixed") == [
        "called mixed but none of its 10 weight matrices is float16; call it mixed-bf16"
    ]


def test_graph_typed_unlike_its_name_is_refused(vit: onnx.ModelProto) -> None:
    assert check_onnx(vit, precision="fp16") == [
        "called fp16 but none of its 6 weight matrices is float16; call it bf16"
    ]
    assert "weight matrices are bfloat16" in check_onnx(vit, precision="fp32")[0]


def test_operator_without_bfloat16_is_named() -> None:
    proto = graph_of(
        """(float[batch,4] images) => (float[batch,4] logits) {
            x = Cast<to=16>(images)
            ["block/Einsum"] y = Einsum<equation="bc,bc->bc">(x, x)
            logits = Cast<to=1>(y)
        }""",
        opset=22,
    )
    assert [(node.op_type, first) for node, first in unsupported_nodes(proto)] == [("Einsum", None)]
    wide = copy.deepcopy(proto)
    wide.graph.node[0].attribute[0].i = TensorProto.FLOAT
    assert unsupported_nodes(wide) == []


def test_precision_names_follow_the_types_of_the_matrices() -> None:
    for shares, word in (({}, "fp32"), ({"float32": 1.0}, "fp32"), ({"float16": 1.0}, "fp16"),
                         ({"bfloat16": 1.0}, "bf16"), ({"bfloat16": 0.5, "float32": 0.5}, "mixed-bf16"),
                         ({"float16": 0.5, "float32": 0.5}, "mixed")):  # fmt: skip
        assert precision_of_shares(shares) == word
    rejects("of float16 and of bfloat16", precision_of_shares, {"bfloat16": 0.5, "float16": 0.5})
    assert [precision_by_name(name).pure for name in ("fp32", "mixed", "mixed-bf16")] == ["fp32", "fp16", "bf16"]


@pytest.mark.parametrize("float_type", [FLOAT32, FLOAT16, BFLOAT16])
def test_operator_types_equal_those_of_torch(float_type: FloatType) -> None:
    told = torch.finfo(getattr(torch, float_type.name))
    assert (float_type.unit_roundoff, float_type.largest) == (told.eps / 2, told.max)
    assert float_type.onnx == getattr(TensorProto, float_type.name.upper().removesuffix("32"))


@pytest.mark.slow("graph")
def test_weights_equal_torchs_bfloat16(vit: onnx.ModelProto) -> None:
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in vit.graph.initializer}
    rounded = Vit(depth=1).patch.weight.detach().bfloat16()
    assert np.array_equal(stored["patch.weight"].view(np.int16), rounded.view(torch.int16).numpy())
