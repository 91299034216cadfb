"""Checks of graphs find every reason why an engine can't be built, and none in a valid graph."""

import math
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from export.graph.check import check_onnx, load_onnx, require_onnx
from export.graph.to_onnx import onnx_bytes
from export.graph.weights import read_matrices, sparse_matrices
from tests.export_vit import Vit, export
from tests.graphs import graph_of
from tests.refusals import rejects


@pytest.fixture(scope="module")
def fp32() -> ModelProto:
    return export(Vit(depth=1))


@pytest.fixture(scope="module")
def fp16() -> ModelProto:
    return export(Vit(depth=1), "fp16")


def attention_graph(qk: int, v: int, dtype: int) -> ModelProto:
    """Build a graph of one opset 23 Attention operator between float32 inputs and outputs."""
    nodes = [
        line
        for each in "qkv"
        for line in (f"{each}_s = Slice(cast, zero, {each}_end, axis)", f"{each} = Reshape({each}_s, shape)")
    ]
    text = f"""(float[batch,2,16,64] images) => (float[batch,{v}] logits) {{
        cast = Cast<to={dtype}>(images) {" ".join(nodes)}
        ["blocks.0.attn/Attention"] y = Attention<scale=0.1>(q, k, v)
        mean = ReduceMean<keepdims=0>(y, axes)
        logits = Cast<to=1>(mean)
    }}"""
    ends = {f"{each}_end": np.array([width // 4]) for each, width in (("q", qk), ("k", qk), ("v", v))}
    small = {"zero": [0], "axis": [3], "axes": [1, 2], "shape": [0, 2, 4, -1]}
    return graph_of(text, opset=23, ir=11, **ends, **{name: np.array(value) for name, value in small.items()})


def test_valid_graph_has_no_fault(fp32: ModelProto, fp16: ModelProto) -> None:
    for backend in ("tensorrt", "tensorrt-rtx", "onnxruntime"):
        assert check_onnx(fp32, precision="fp32", backend=backend) == []
        assert check_onnx(fp16, precision="fp16", backend=backend) == []
    assert check_onnx(fp16) == []


def relabel(proto: ModelProto) -> None:
    next(entry for entry in proto.metadata_props if entry.key == "export.precision").value = "fp16"


def half_input(proto: ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    proto.graph.node.insert(0, helper.make_node("Cast", ["images"], ["wide"], to=TensorProto.FLOAT))
    for node in proto.graph.node[1:]:
        node.input[:] = ["wide" if name == "images" else name for name in node.input]


def foreign_operator(proto: ModelProto) -> None:
    proto.opset_import.add(domain="com.microsoft", version=1)
    index, gelu = next((index, node) for index, node in enumerate(proto.graph.node) if node.op_type == "Gelu")
    del gelu.attribute[:]
    proto.graph.node[index].domain = "com.microsoft"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (relabel, "called fp16 but none of its 6 weight matrices is float16"),
        (lambda proto: setattr(proto.opset_import[0], "version", 13), "opset 13 is outside 17 to 23"),
        (lambda proto: setattr(proto.opset_import[0], "version", 99), "opset 99 is outside 17 to 23"),
        (half_input, "images must be float32, got float16"),
        (lambda proto: set_external_data(proto.graph.initializer[0], "weights.bin"), "1 weights lie in another file"),
        (
            lambda proto: setattr(proto.graph.node[3], "doc_string", 'File "/home/me/model.py", line 3'),
            "1 notes hold a local path \\(first 'doc_string': /home/me...\\)",
        ),
        (lambda proto: proto.metadata_props.add(key="from", value="C:\\models\\vit.pth"), "'from': C:"),
        (
            lambda proto: setattr(proto.graph.node[2], "name", proto.graph.node[1].name),
            "1 node names are used more than once",
        ),
        (lambda proto: proto.graph.node[5].input.__setitem__(0, "nowhere"), "onnx.checker: .*nowhere"),
        (foreign_operator, "domain 'com.microsoft' are used, which tensorrt does not know"),
    ],
)
def test_each_fault_is_named(fp32: ModelProto, change: Callable[[ModelProto], object], says: str) -> None:
    broken = deepcopy(fp32)
    change(broken)
    reasons = check_onnx(broken)
    assert [bool(re.search(says, reason)) for reason in reasons] == [True], reasons


def test_wrong_precision_names_both_types(fp32: ModelProto, fp16: ModelProto) -> None:
    assert "called fp16 but none" in check_onnx(fp32, precision="fp16")[0]
    assert "called mixed but none" in check_onnx(fp32, precision="mixed")[0]
    assert "called fp32 but 6 of 6" in check_onnx(fp16, precision="fp32")[0]
    assert "called mixed but every" in check_onnx(fp16, precision="mixed")[0]
    one_left = deepcopy(fp16)
    head = next(tensor for tensor in one_left.graph.initializer if tensor.name == "head.weight")
    head.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(head).astype(np.float32), "head.weight"))
    names = [node.name for node in one_left.graph.node]
    at = names.index("head/Gemm")
    gemm = one_left.graph.node[at]
    gemm.input[0], gemm.input[2], gemm.output[0] = "wide", "wide_bias", "logits"
    del one_left.graph.node[-1]
    del one_left.graph.value_info[:]
    one_left.graph.node.insert(at, helper.make_node("Cast", ["Gather:0"], ["wide"], to=TensorProto.FLOAT))
    one_left.graph.node.insert(at, helper.make_node("Cast", ["head.bias"], ["wide_bias"], to=TensorProto.FLOAT))
    assert check_onnx(one_left, precision="fp16") == [
        "called fp16 but 1 of 6 weight matrices are float32 (first at head/Gemm)"
    ]


@pytest.mark.parametrize(
    ("qk", "v", "dtype", "says"),
    [
        (32, 32, TensorProto.FLOAT16, None),
        (32, 64, TensorProto.FLOAT16, "blocks.0.attn/Attention: .* equal widths of k and v, got \\(32, 64\\)"),
        (32, 32, TensorProto.FLOAT, "no kernel computes the Attention operator in float32"),
    ],
)
def test_attention_operator_tensorrt_cannot_parse_is_refused(qk: int, v: int, dtype: int, says: str | None) -> None:
    proto = attention_graph(qk, v, dtype)
    onnx.checker.check_model(proto)
    reasons = check_onnx(proto, backend="tensorrt-rtx")
    assert [bool(re.search(says, reason)) for reason in reasons] == [True] if says else reasons == []
    assert check_onnx(proto, backend="onnxruntime") == []


def test_files_that_are_not_models_are_refused(fp32: ModelProto, tmp_path: Path) -> None:
    whole = onnx_bytes(fp32)
    for name, content in (("cut", whole[: len(whole) // 2]), ("empty", b""), ("text", b"not one\n"), ("zip", b"PK")):
        (tmp_path / f"{name}.onnx").write_bytes(content)
        rejects(name, load_onnx, tmp_path / f"{name}.onnx")
    rejects("no such ONNX file", require_onnx, tmp_path / "absent.onnx")
    (tmp_path / "whole.onnx").write_bytes(whole)
    assert require_onnx(tmp_path / "whole.onnx", precision="fp32").graph.node
    rejects("can't be built with tensorrt", require_onnx, tmp_path / "whole.onnx", precision="fp16")


def test_weights_are_counted_by_element(fp16: ModelProto) -> None:
    by_hand = 64 * 3 * 64 + 64 * 192 + 64 * 64 + 2 * 64 * 128 + 64 * 10
    assert sum(math.prod(tensor.dims) for *_, tensor in read_matrices(fp16)) == by_hand


def test_two_to_four_sparsity_is_counted_along_the_input_axis(fp32: ModelProto) -> None:
    linear = [node.name for node, *_ in read_matrices(fp32) if node.name.endswith("MatMul")]
    classifier = {"head/Gemm": False}  # sums over channels too; the patch embedding over three colours has no groups
    assert sparse_matrices(fp32) == dict.fromkeys(linear, False) | classifier
    assert len(linear) == 4
    for along, sparse in ((0, True), (1, False)):  # MatMul reads [in, out] and sums over in
        proto = deepcopy(fp32)
        for tensor in proto.graph.initializer:
            if tensor.name.endswith("MatMul.1"):
                values = numpy_helper.to_array(tensor).copy()
                groups = np.moveaxis(values, along, -1)
                groups[:, 0::4] = 0
                groups[:, 3::4] = 0
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        assert sparse_matrices(proto) == dict.fromkeys(linear, sparse) | classifier
