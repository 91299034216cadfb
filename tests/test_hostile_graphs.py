"""Graphs made to harm: refused before a runtime opens them, whoever was to read them."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, TypeProto, helper, numpy_helper

from corp_deploy.proof.candidates import candidate_from_path
from corp_deploy.proof.heads import open_heads
from corp_deploy.store.checkpoint import save
from corp_deploy.store.graph_facts import NORMALISED, PREFIX, SPARSITY, facts_of_onnx
from corp_deploy.store.onnx_file import require_sparse_graph
from export.graph.check import check_onnx, load_onnx
from export.triton.signature import signature_from_onnx
from ground.errors import BadInput
from ground.onnx_file import read_onnx
from ground.onnx_types import bits_of
from ground.ports import OutputPort
from perf.parity.rounding import round_file
from perf.runners.onnx import OnnxRunner, onnx_precision
from perf.runners.onnx_session import read_onnx_ports
from tests import tiny
from tests.command import refuses
from tests.export_served import write_onnx
from tests.graphs import graph_of
from tests.refusals import rejects

READERS: dict[str, Callable[[Path], object]] = {
    "runner": lambda path: OnnxRunner(path).__enter__(),
    "export": load_onnx,
    "facts": facts_of_onnx,
    "borders": read_onnx_ports,
    "precision": onnx_precision,
    "rounding": lambda path: round_file(path, path.with_suffix(".rounded")),
}


@pytest.fixture
def graph(tmp_path: Path) -> ModelProto:
    """x [n,4] times w [4,4]; its weight is inside."""
    (tmp_path / "in").mkdir()
    return graph_of('(float[n,4] x) => (float[n,4] y) { ["m"] y = MatMul(x, w) }', w=np.eye(4, dtype=np.float32))


def written(proto: ModelProto, folder: Path) -> Path:
    path = folder / "in" / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def outside(proto: ModelProto, **entries: str) -> ModelProto:
    """The weight in another file, as these entries say."""
    weight = proto.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    return proto


def refused_by_all(path: Path, said: str) -> None:
    for name, read in READERS.items():
        with pytest.raises(BadInput, match=said) as error:
            read(path)
        assert len(str(error.value)) < 600, name
    assert [path.name for path in path.parent.glob("*.rounded")] == []


CANARY = np.arange(16, dtype=np.float32).tobytes()
LOCATIONS = {
    "a parent": ("../canary", "leads out of its directory"),
    "a parent on the way": ("a/../../canary", "leads out of its directory"),
    "an absolute path": ("/etc/hostname", "leads out of its directory"), "nothing": ("", "leads out of its directory"),
    "a NUL": ("w.bin\0x", "leads out of its directory"), "a link": ("link.bin", "'link.bin' is a link"),
    "a linked directory": ("linked/canary", "'linked' is a link"), "a hard link": ("hard.bin", "hard links"),
    "a directory": ("folder", "expected a regular file"), "a pipe": ("pipe", "pipe, socket or device"),
    "no file": ("none.bin", "there is no such file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOCATIONS)
def test_external_weights_must_lie_below_the_graph(graph: ModelProto, tmp_path: Path, kind: str) -> None:
    location, said = LOCATIONS[kind]
    (tmp_path / "canary").write_bytes(CANARY)
    inside = tmp_path / "in"
    (inside / "folder").mkdir()
    (inside / "link.bin").symlink_to(tmp_path / "canary")
    (inside / "linked").symlink_to(tmp_path)
    (inside / "hard.bin").hardlink_to(tmp_path / "canary")
    os.mkfifo(inside / "pipe")
    refused_by_all(written(outside(graph, location=location), tmp_path), said)


ENTRIES: dict[str, tuple[dict[str, str], str]] = {
    "an offset past the end": ({"offset": "65"}, "lies at 65 to"),
    "a length past the end": ({"offset": "8", "length": "64"}, "lies at 8 to 72 of w.bin, which has 64 bytes"),
    "fewer bytes than numbers": ({"length": "60"}, "some of its numbers are missing"),
    "a negative offset": ({"offset": "-64"}, "offset '-64', expected a whole number"),
    "digits of another script": ({"length": "٣"}, "expected a whole number"),
    "a number of 5,000 digits": ({"length": "9" * 5000}, "expected a whole number"),
    "an unknown key": (
        {"__class__": "x"},
        "with the unknown key '__class__'; expected location, offset, length, checksum",
    ),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_external_weights_must_end_within_their_file(graph: ModelProto, tmp_path: Path, kind: str) -> None:
    entries, said = ENTRIES[kind]
    (tmp_path / "in" / "w.bin").write_bytes(CANARY)
    refused_by_all(written(outside(graph, location="w.bin", **entries), tmp_path), said)


def test_external_weights_are_read_from_allowed_places(graph: ModelProto, tmp_path: Path) -> None:
    (tmp_path / "in" / "w.bin").write_bytes(bytes(8) + CANARY)
    path = written(outside(graph, location="w.bin", offset="8", length="64"), tmp_path)
    read = numpy_helper.to_array(read_onnx(path).graph.initializer[0])
    np.testing.assert_array_equal(read, np.arange(16, dtype=np.float32).reshape(4, 4))
    with OnnxRunner(path) as runner:
        np.testing.assert_array_equal(runner({"x": np.eye(4, dtype=np.float32)})["y"], read)
    assert "lie in another file" in check_onnx(load_onnx(path))[0]


def in_attribute(proto: ModelProto, tensor: TensorProto) -> None:
    proto.graph.node.append(helper.make_node("Constant", [], ["c"], "c", value=tensor))


def in_subgraph(proto: ModelProto, tensor: TensorProto) -> None:
    branch = helper.make_graph([], "b", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, [4])], [tensor])
    proto.graph.node.append(helper.make_node("If", ["x"], ["z"], "i", then_branch=branch, else_branch=branch))


def in_sparse(proto: ModelProto, tensor: TensorProto) -> None:
    proto.graph.sparse_initializer.add(dims=[4]).values.CopyFrom(tensor)


def in_function(proto: ModelProto, tensor: TensorProto) -> None:
    node = helper.make_node("Constant", [], ["c"], "c", value=tensor)
    proto.functions.append(helper.make_function("f", "F", [], ["c"], [node], [helper.make_opsetid("", 20)]))


@pytest.mark.parametrize("place", [in_attribute, in_subgraph, in_sparse, in_function])
def test_every_tensor_location_is_checked(
    graph: ModelProto, tmp_path: Path, place: Callable[[ModelProto, TensorProto], None]
) -> None:
    tensor = outside(ModelProto.FromString(graph.SerializeToString()), location="/etc/hostname").graph.initializer[0]
    place(graph, tensor)
    refused_by_all(written(graph, tmp_path), "leads out of its directory")


FEW = TensorProto(name="t", data_type=TensorProto.STRING, dims=[2**40], string_data=[b"a"])
HELD = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w").raw_data


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        ({"dims": (10**6, 10**6)}, "some of its numbers are missing"),
        ({"dims": (2**62, 2**62, 2**62)}, "some of its numbers are missing"),
        ({"dims": (-4, -4)}, "which is not a valid shape"),
        ({"dims": (10**9, 10**9), "raw_data": b"", "float_data": [1.0] * 4}, "some of its numbers are missing"),
        (FEW, r"weight 't' is \[1099511627776\], and some of its numbers are missing"),
        ({"raw_data": HELD + bytes(4)}, r"weight 'w' is \[4, 4\], 64 bytes, and 68 are there"),
        ({"segment": TensorProto.Segment(begin=3)}, "weight 'w' is a segment of a larger one"),
        ({"data_type": 0}, "weight 'w' is of element type 0"),
    ],
)
def test_weight_must_have_its_declared_numbers(graph: ModelProto, tmp_path: Path, weight: Any, said: str) -> None:
    if isinstance(weight, dict):
        own: dict[str, Any] = {"name": "w", "data_type": TensorProto.FLOAT, "dims": (4, 4), "raw_data": HELD}
        given = {key: value for key, value in (own | weight).items() if value != b""}
        graph.graph.initializer[0].CopyFrom(TensorProto(**given))
    else:
        graph.graph.initializer.append(weight)
    refused_by_all(written(graph, tmp_path), said)


@pytest.mark.parametrize("operator", ["EPContext", "PyOp"])
def test_nodes_with_engines_or_code_are_refused(graph: ModelProto, tmp_path: Path, operator: str) -> None:
    graph.graph.node[0].op_type = operator
    graph.graph.node[0].domain = "com.microsoft"
    refused_by_all(written(graph, tmp_path), f"is of {operator}, which holds compiled code")


def calling(graph: ModelProto, calls: dict[str, list[str]]) -> ModelProto:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    for name, called in calls.items():
        nodes = [helper.make_node(each, ["a"], ["b"], domain="f") for each in called]
        graph.functions.append(helper.make_function("f", name, ["a"], ["b"], nodes, opsets))
    graph.graph.node.append(helper.make_node("F0", ["x"], ["z"], "call", domain="f"))
    graph.opset_import.append(helper.make_opsetid("f", 1))
    return graph


def test_recursive_functions_are_refused(graph: ModelProto, tmp_path: Path) -> None:
    path = written(calling(graph, {"F0": ["F1"], "F1": ["F0"]}), tmp_path)
    refused_by_all(path, "call one another in a circle")
    del graph.functions[:], graph.graph.node[1:], graph.opset_import[1:]
    doubled: dict[str, list[str]] = {f"F{depth}": [f"F{depth + 1}"] * 2 for depth in range(60)}
    refused_by_all(written(calling(graph, doubled | {"F60": ["F61"]}), tmp_path), "unfolds to .* nodes")


def tensor_of(number: int) -> TypeProto:
    return helper.make_tensor_type_proto(number, [4])


def of_value(make: Callable[[TypeProto], TypeProto]) -> Callable[[ModelProto, int], None]:
    """The graph's input of such a type."""
    return lambda proto, number: proto.graph.input[0].type.CopyFrom(make(tensor_of(number)))


def of_output(proto: ModelProto, number: int) -> None:
    proto.graph.output[0].type.tensor_type.elem_type = number


def of_inner_value(proto: ModelProto, number: int) -> None:
    value = helper.make_value_info("w", tensor_of(number))
    branch = helper.make_graph([], "b", [], [value])
    proto.graph.node.append(helper.make_node("If", ["x"], ["z"], "i", then_branch=branch, else_branch=branch))


def of_tensor(place: Callable[[ModelProto, TensorProto], None]) -> Callable[[ModelProto, int], None]:
    return lambda proto, number: place(proto, TensorProto(name="c", data_type=number, dims=[1], raw_data=bytes(8)))


def of_function(proto: ModelProto, number: int) -> None:
    cast = helper.make_node("Cast", ["a"], ["b"], "c", to=number)
    proto.functions.append(helper.make_function("f", "F", ["a"], ["b"], [cast], [helper.make_opsetid("", 20)]))


def of_attribute(proto: ModelProto, number: int) -> None:
    node = helper.make_node("Optional", [], ["z"], "o")
    node.attribute.append(helper.make_attribute("type", tensor_of(number)))
    proto.graph.node.append(node)


TYPED: dict[str, Callable[[ModelProto, int], None]] = {
    "an input": of_value(lambda kind: kind),
    "a sequence": of_value(helper.make_sequence_type_proto),
    "an optional": of_value(helper.make_optional_type_proto),
    "an optional sequence": of_value(
        lambda kind: helper.make_optional_type_proto(helper.make_sequence_type_proto(kind))
    ),
    "a map": of_value(lambda kind: helper.make_map_type_proto(TensorProto.INT64, kind)),
    "a map's key": lambda proto, number: proto.graph.input[0].type.CopyFrom(
        helper.make_map_type_proto(number, tensor_of(1))
    ),
    "a sparse input": of_value(lambda kind: helper.make_sparse_tensor_type_proto(kind.tensor_type.elem_type, [4])),
    "an output": of_output,
    "a value": lambda proto, number: proto.graph.value_info.add(name="x").type.CopyFrom(tensor_of(number)),
    "a value inside": of_inner_value,
    "a weight": lambda proto, number: setattr(proto.graph.initializer[0], "data_type", number),
    "a constant": of_tensor(in_attribute),
    "a sparse weight": of_tensor(in_sparse),
    "a cast": lambda proto, number: proto.graph.node.append(helper.make_node("Cast", ["y"], ["z"], "c", to=number)),
    "a function's cast": of_function,
    "an attribute": of_attribute,
}


@pytest.mark.parametrize("number", [99, -5])
@pytest.mark.parametrize("place", TYPED)
def test_unknown_element_types_are_refused(graph: ModelProto, tmp_path: Path, place: str, number: int) -> None:
    TYPED[place](graph, number)
    said = rf"m.onnx: .* is of element type {number}, which ONNX lacks; expected 1 \(float32\) to \d+ "
    refused_by_all(written(graph, tmp_path), said)


def test_element_type_bits_equal_onnxs() -> None:
    for name, number in TensorProto.DataType.items():
        if number not in (TensorProto.UNDEFINED, TensorProto.STRING):
            packed = helper.make_tensor("x", number, [8], np.zeros(8))
            raw = numpy_helper.from_array(numpy_helper.to_array(packed)).raw_data
            assert len(raw) == bits_of(number), name


def cast(graph: ModelProto, number: int) -> ModelProto:
    """Its output of another type."""
    graph.graph.node[0].output[0] = "z"
    graph.graph.node.append(helper.make_node("Cast", ["z"], ["y"], "c", to=number))
    of_output(graph, number)
    return graph


def within(graph: ModelProto, operator: str, make: Callable[[TypeProto], TypeProto]) -> ModelProto:
    graph.graph.node[0].output[0] = "z"
    graph.graph.node.append(helper.make_node(operator, ["z"], ["y"], "c"))
    graph.graph.output[0].type.CopyFrom(make(helper.make_tensor_type_proto(1, None)))
    return graph


def no_output(graph: ModelProto) -> ModelProto:
    del graph.graph.output[:]
    return graph


def only_a_break(graph: ModelProto) -> ModelProto:
    graph.graph.node[0].output[0] = graph.graph.output[0].name = "fusion_break.y"
    return graph


UNREAD: dict[str, tuple[Callable[[ModelProto], ModelProto], str]] = {
    "string": (lambda graph: cast(graph, TensorProto.STRING), "y: string"),
    "bfloat16": (lambda graph: cast(graph, TensorProto.BFLOAT16), "y: bfloat16"),
    "float8": (lambda graph: cast(graph, TensorProto.FLOAT8E5M2), "y: float8e5m2"),
    "int4": (lambda graph: cast(graph, TensorProto.INT4), "y: int4"),
    "a sequence": (
        lambda graph: within(graph, "SequenceConstruct", helper.make_sequence_type_proto),
        r"y: seq(\(tensor\(float\)\)|uence)",
    ),
    "an optional": (
        lambda graph: within(graph, "Optional", helper.make_optional_type_proto),
        r"y: optional(\(tensor\(float\)\))?",
    ),
    "none": (no_output, "none"),
    "a fusion break": (only_a_break, "none"),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_unsupported_output_types_are_refused(graph: ModelProto, tmp_path: Path, kind: str) -> None:
    change, said = UNREAD[kind]
    path = written(change(graph), tmp_path)
    for read in (read_onnx_ports, READERS["runner"]):
        rejects(rf"m.onnx: expected outputs that are tensors of float32, .*; found {said}$", read, path)


@pytest.mark.parametrize(
    ("number", "name"), [(TensorProto.STRING, "string"), (TensorProto.DOUBLE, "float64"), (TensorProto.INT8, "int8")]
)
def test_unsupported_input_types_are_refused(graph: ModelProto, tmp_path: Path, number: int, name: str) -> None:
    graph.graph.node[0].input[0] = "z"
    graph.graph.node.insert(0, helper.make_node("Cast", ["x"], ["z"], "c", to=TensorProto.FLOAT))
    graph.graph.input[0].type.tensor_type.elem_type = number
    path = written(graph, tmp_path)
    for read in (read_onnx_ports, READERS["runner"]):
        rejects(rf"expected inputs .* of float32, .*; found x: {name} ", read, path)


def test_non_tensor_input_is_named(graph: ModelProto, tmp_path: Path) -> None:
    graph.graph.input[0].type.CopyFrom(helper.make_sequence_type_proto(tensor_of(1)))
    rejects(r"expected inputs with a batch in front, got x: sequence \[\]", facts_of_onnx, written(graph, tmp_path))


def test_input_beyond_any_memory_is_refused(graph: ModelProto, tmp_path: Path) -> None:
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**62
    refused_by_all(written(graph, tmp_path), r"the tensor 'x' is \[4611686018427387904, 4\], 1099511627776 numbers at")


def test_negative_size_is_dynamic_and_zero_batch_is_refused(graph: ModelProto, tmp_path: Path) -> None:
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -7
    path = written(graph, tmp_path)
    assert (facts_of_onnx(path).batch, read_onnx_ports(path)[2]) == (None, None)
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0
    path = written(graph, tmp_path)
    assert read_onnx_ports(path)[2] == 0
    with OnnxRunner(path) as runner, pytest.raises(BadInput, match=r"takes x \[0, 4\], got \[1, 4\]"):
        runner({"x": np.ones((1, 4), np.float32)})


@pytest.mark.parametrize("version", [-1, 2**62])
def test_opset_version_must_be_supported(graph: ModelProto, tmp_path: Path, version: int) -> None:
    said = rf"imports the operators 'ai.onnx' of version {version}, expected 0 to 10000"
    graph.opset_import[0].version = version
    refused_by_all(written(graph, tmp_path), said)
    of_function(graph, TensorProto.INT8)
    graph.opset_import[0].version, graph.functions[0].opset_import[0].version = 20, version
    refused_by_all(written(graph, tmp_path), said)


def contradicted(proto: ModelProto) -> None:
    """A weight that is among the inputs too, and of another type there."""
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.INT64, [4, 4]))


def fp8(proto: ModelProto, **attributes: Any) -> None:
    """Its weight in FP8, with a scale for each column."""
    weight = TensorProto(name="q", data_type=TensorProto.FLOAT8E4M3FN, dims=[4, 4], raw_data=bytes(16))
    proto.graph.initializer[0].CopyFrom(weight)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "s"))
    proto.graph.node.insert(0, helper.make_node("DequantizeLinear", ["q", "s"], ["w"], "d", **attributes))


def computed_scales(proto: ModelProto) -> None:
    fp8(proto, axis=1)
    proto.graph.node[0].input[1] = "t"
    proto.graph.node.insert(0, helper.make_node("Identity", ["s"], ["t"], "i"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda proto: proto.graph.node[0].ClearField("input"), "onnx.checker: "),
        (lambda proto: proto.graph.node[0].ClearField("output"), "onnx.checker: "),
        (contradicted, "types or shapes contradict its nodes"),
        (lambda proto: fp8(proto, axis=7), "d: its FP8 scales are not stored in the graph"),
        (computed_scales, "d: its FP8 scales are not stored in the graph"),
    ],
)
def test_unroundable_graph_is_refused(
    graph: ModelProto, tmp_path: Path, change: Callable[[ModelProto], None], said: str
) -> None:
    change(graph)
    path = written(graph, tmp_path)
    rejects(rf"m.onnx: .*{said}.*export it again", round_file, path, path.with_suffix(".rounded"))
    assert not path.with_suffix(".rounded").exists()


def test_fp8_scales_default_to_the_second_axis(graph: ModelProto, tmp_path: Path) -> None:
    fp8(graph)
    path = written(graph, tmp_path)
    round_file(path, path.with_suffix(".onnx.rounded"))
    with OnnxRunner(path.with_suffix(".onnx.rounded")) as runner:
        assert runner({"x": np.ones((2, 4), np.float32)})["y"].tolist() == [[0.0] * 4] * 2


def reduced(operator: str, **attributes: Any) -> Callable[[ModelProto], None]:
    """The output behind such a node."""

    def change(proto: ModelProto) -> None:
        proto.graph.node[0].output[0] = "z"
        proto.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "axes"))
        reads = {"Concat": ["z", "z"], "MatMul": ["x", "t"]}.get(operator, ["z", "axes"])
        if operator == "MatMul":
            proto.graph.node.append(helper.make_node("Transpose", ["x"], ["t"], "t", perm=[1, 0]))
        proto.graph.node.append(helper.make_node(operator, reads, ["y"], "r", **attributes))
        proto.graph.output[0].type.tensor_type.ClearField("shape")

    return change


ROWLESS = {
    "no batch": (reduced("ReduceMax", keepdims=0), r"gives y \[4\] to a batch of 3"),
    "twice the batch": (reduced("Concat", axis=0), r"gives y \[6, 4\] to a batch of 3"),
}


@pytest.mark.parametrize("kind", ROWLESS)
def test_outputs_need_one_row_per_input(graph: ModelProto, tmp_path: Path, kind: str) -> None:
    change, said = ROWLESS[kind]
    change(graph)
    path, ports = written(graph, tmp_path), [OutputPort(name="y", role="logits")]
    feeds = {"x": np.ones((3, 4), np.float32)}
    expected = rf"m.onnx.* {said}, expected a row for each input, \[3, \.\.\.\]"
    with candidate_from_path(path).opened(ports) as run, pytest.raises(BadInput, match=expected):
        run(feeds)
    backbone = [OutputPort(name="x", role="embedding")]
    with open_heads((path,), backbone) as heads:
        whole = heads.behind(lambda fed: {"x": fed["x"]}, 3)
        rejects(expected, whole, feeds)


def test_graph_without_outputs_is_not_served(graph: ModelProto, tmp_path: Path) -> None:
    path = written(only_a_break(graph), tmp_path)
    rejects("takes x and gives nothing, expected inputs and outputs", signature_from_onnx, path)


def test_every_command_reports_a_bad_graph_alike(tmp_path: Path) -> None:
    both, out = tmp_path / "both", tmp_path / "out"
    for name in ("dense", "reduced"):
        save(tiny.checkpoint(depth=1), both / name)
    dense, good, bad = both / "dense", both / "dense" / "model.onnx", both / "reduced" / "model.onnx"
    proto = onnx.load(str(write_onnx(good, shape=(3, 32, 32), classes=7)))
    proto.graph.input[0].type.tensor_type.elem_type = 99
    bad.write_bytes(proto.SerializeToString())
    for words in (
        ["verify", dense, bad, "--random", 2, "-o", out],
        ["verify", dense, bad, "--random", 2, "-o", out, "--runtime", "openvino"],
        ["verify", dense, good, "--random", 2, "-o", out, "--head", bad],
        ["verify", good, bad, "--random", 2, "-o", out, "--other-graph"],
        ["verify", bad, "--random", 2, "--write-golden", out],
        ["bench", good, bad, "-o", out],
        ["bench", good, bad, "-o", out, "--backend", "openvino"],
        ["build", bad, "-o", tmp_path / "m.plan"],
        ["audit", bad, good],
        ["package", both, "-o", out, "--name", "vit"],
    ):
        refuses("the tensor 'images' is of element type 99, which ONNX lacks", *words)
        assert [each.name for each in tmp_path.iterdir()] == ["both"]


def test_graph_metadata_is_bounded_in_size(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx")
    proto = onnx.load(str(path))
    for note in ("export.outputs", NORMALISED, f"{PREFIX}{SPARSITY}"):
        helper.set_model_props(proto, {note: "[" * 100_000})
        path.write_bytes(proto.SerializeToString())
        if note == NORMALISED:
            assert facts_of_onnx(path).normalised is None
        else:
            read = read_onnx_ports if note == "export.outputs" else partial(require_sparse_graph, proto)
            rejects("nested too deep", read, path)
