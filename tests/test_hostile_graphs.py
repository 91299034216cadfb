"""Graphs made to harm: refused before a runtime opens them, whoever was to read them."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, helper, numpy_helper

from corp_deploy.cli import main
from corp_deploy.store.graph_input import NORMALISED
from corp_deploy.store.onnx_file import facts_of_onnx
from corp_deploy.store.sparse_graph import PREFIX, SPARSITY, require_sparse_graph
from export.graph.check import check_onnx, load_onnx
from ground.errors import BadInput
from ground.onnx_file import read_onnx
from perf.parity.rounding import round_file
from perf.runners.graph_borders import borders_of_onnx
from perf.runners.onnx import OnnxRunner, onnx_precision
from tests.export_served import write_onnx

READERS: dict[str, Callable[[Path], object]] = {
    "runner": lambda path: OnnxRunner(path).__enter__(),
    "export": load_onnx,
    "facts": facts_of_onnx,
    "borders": borders_of_onnx,
    "precision": onnx_precision,
    "rounding": lambda path: round_file(path, path.with_suffix(".rounded")),
}


@pytest.fixture
def graph(tmp_path: Path) -> ModelProto:
    """x [n,4] times w [4,4]; its weight is inside."""
    (tmp_path / "in").mkdir()
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    body = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], "m")], "g", value[:1], value[1:], [weight])
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


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
    "an absolute path": ("/etc/hostname", "leads out of its directory"),
    "nothing": ("", "leads out of its directory"),
    "a NUL": ("w.bin\0x", "leads out of its directory"),
    "a link": ("link.bin", "'link.bin' is a link"),
    "a linked directory": ("linked/canary", "'linked' is a link"),
    "a hard link": ("hard.bin", "hard links"),
    "a directory": ("folder", "expected a regular file"),
    "a pipe": ("pipe", "pipe, socket or device"),
    "no file": ("none.bin", "there is no such file"),
}


@pytest.mark.parametrize("kind", LOCATIONS)
def test_weights_outside_stay_below_the_graph(graph: ModelProto, tmp_path: Path, kind: str) -> None:
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
    "fewer bytes than numbers": ({"length": "60"}, "its numbers are not all there"),
    "a negative offset": ({"offset": "-64"}, "offset '-64', expected a whole number"),
    "digits of another script": ({"length": "٣"}, "expected a whole number"),
    "a number of 5,000 digits": ({"length": "9" * 5000}, "expected a whole number"),
    "an unknown key": ({"__class__": "x"}, "with the key '__class__'; known are location, offset, length, checksum"),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_weights_outside_end_where_their_file_ends(graph: ModelProto, tmp_path: Path, kind: str) -> None:
    entries, said = ENTRIES[kind]
    (tmp_path / "in" / "w.bin").write_bytes(CANARY)
    refused_by_all(written(outside(graph, location="w.bin", **entries), tmp_path), said)


def test_weights_outside_are_read_where_they_may_be(graph: ModelProto, tmp_path: Path) -> None:
    (tmp_path / "in" / "w.bin").write_bytes(bytes(8) + CANARY)
    path = written(outside(graph, location="w.bin", offset="8", length="64"), tmp_path)
    read = numpy_helper.to_array(read_onnx(path).graph.initializer[0])
    np.testing.assert_array_equal(read, np.arange(16, dtype=np.float32).reshape(4, 4))
    with OnnxRunner(path) as runner:
        np.testing.assert_array_equal(runner({"x": np.eye(4, dtype=np.float32)})["y"], read)
    assert "lie in another file" in check_onnx(path)[0]


def in_attribute(proto: ModelProto, tensor: TensorProto) -> None:
    proto.graph.node.append(helper.make_node("Constant", [], ["c"], "c", value=tensor))


def in_subgraph(proto: ModelProto, tensor: TensorProto) -> None:
    branch = helper.make_graph([], "b", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, [4])], [tensor])
    proto.graph.node.append(helper.make_node("If", ["x"], ["z"], "i", then_branch=branch, else_branch=branch))


def in_sparse(proto: ModelProto, tensor: TensorProto) -> None:
    sparse = proto.graph.sparse_initializer.add(dims=[4])
    sparse.values.CopyFrom(tensor)


def in_function(proto: ModelProto, tensor: TensorProto) -> None:
    node = helper.make_node("Constant", [], ["c"], "c", value=tensor)
    proto.functions.append(helper.make_function("f", "F", [], ["c"], [node], [helper.make_opsetid("", 20)]))


@pytest.mark.parametrize("place", [in_attribute, in_subgraph, in_sparse, in_function])
def test_no_place_of_a_tensor_is_forgotten(
    graph: ModelProto, tmp_path: Path, place: Callable[[ModelProto, TensorProto], None]
) -> None:
    tensor = outside(ModelProto.FromString(graph.SerializeToString()), location="/etc/hostname").graph.initializer[0]
    place(graph, tensor)
    refused_by_all(written(graph, tmp_path), "leads out of its directory")


def dims(*sizes: int) -> Callable[[ModelProto], None]:
    def change(proto: ModelProto) -> None:
        proto.graph.initializer[0].dims[:] = sizes

    return change


def emptied(proto: ModelProto) -> None:
    proto.graph.initializer[0].CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, [4], [1.0] * 4))
    proto.graph.initializer[0].dims[:] = (10**9, 10**9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dims(10**6, 10**6), "its numbers are not all there"),
        (dims(2**62, 2**62, 2**62), "its numbers are not all there"),
        (dims(-4, -4), "which is no shape"),
        (emptied, "its numbers are not all there"),
    ],
)
def test_a_weight_has_the_numbers_that_it_says(
    graph: ModelProto, tmp_path: Path, change: Callable[[ModelProto], None], said: str
) -> None:
    change(graph)
    refused_by_all(written(graph, tmp_path), said)


@pytest.mark.parametrize("operator", ["EPContext", "PyOp"])
def test_a_node_that_holds_an_engine_or_code(graph: ModelProto, tmp_path: Path, operator: str) -> None:
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


def test_functions_end(graph: ModelProto, tmp_path: Path) -> None:
    path = written(calling(graph, {"F0": ["F1"], "F1": ["F0"]}), tmp_path)
    refused_by_all(path, "call one another in a circle")
    del graph.functions[:], graph.graph.node[1:], graph.opset_import[1:]
    doubled: dict[str, list[str]] = {f"F{depth}": [f"F{depth + 1}"] * 2 for depth in range(60)}
    refused_by_all(written(calling(graph, doubled | {"F60": ["F61"]}), tmp_path), "unfolds to .* nodes")


def test_notes_of_a_graph_are_bounded_as_any_record(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx")
    proto = onnx.load(str(path))
    for note in ("export.outputs", NORMALISED, f"{PREFIX}{SPARSITY}"):
        helper.set_model_props(proto, {note: "[" * 100_000})
        path.write_bytes(proto.SerializeToString())
        if note == "export.outputs":
            with pytest.raises(BadInput, match="nested too deep"):
                borders_of_onnx(path)
        elif note == NORMALISED:
            assert facts_of_onnx(path).normalised is None
        else:
            with pytest.raises(BadInput, match="nested too deep"):
                require_sparse_graph(proto, path)


def test_commands_end_with_exit_code_2(graph: ModelProto, tmp_path: Path) -> None:
    path = written(outside(graph, location="/etc/hostname"), tmp_path)
    for words in (["bench", path, path, "-o", tmp_path / "b.json"], ["build", path, "-o", tmp_path / "m.plan"]):
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == 2, done.output
        assert "leads out of its directory" in done.stderr
        assert sorted(each.name for each in tmp_path.iterdir()) == ["in"]
