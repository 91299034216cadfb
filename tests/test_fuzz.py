"""A few changed files of every format, the same in every run, and what larger runs found."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings

from benchmarks.trust import fuzz
from calib.groups import group_ids
from corp_deploy.commands.options import FILE
from export.graph.check import check_onnx
from ground.onnx_file import read_onnx
from ground.text import LONGEST_MESSAGE, message_line
from tests import tiny
from tests.refusals import rejects

NAMES = (
    *fuzz.RECORDS, "snapshot/config.json", "plain.safetensors", "sealed.safetensors", "m/config.json",
    "report/config.json",
    "w/model.safetensors", "w.safetensors", "w.pth", "recipe.toml", "rule.txt",
    "repository/golden_cpu/config.pbtxt", "g.onnx", "rounded.onnx", "photos/a.png", "photos/a.jpeg", "photos/a.webp",
    "photos/a.bmp", "i.npy", "i.npz", "i.safetensors", "i.tar", "l.npy", "l.npz", "groups.npy", "groups.json", "t.txt",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def formats(home: Path) -> dict[str, fuzz.Format]:
    return fuzz.formats(home)


def test_every_format_is_fuzzed(formats: dict[str, fuzz.Format]) -> None:
    assert tuple(formats) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_valid_files_are_accepted_and_mutated_ones_accepted_or_refused(
    name: str, formats: dict[str, fuzz.Format], tmp_path: Path
) -> None:
    each = formats[name]
    assert any([each.accepts(content, tmp_path) for content in each.valid])  # noqa: C419 (all are tried)
    quick = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

    @quick
    @given(each.changed())
    def attacked(content: bytes) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Reading `.npy` or `.npz` file required additional header parsing")
            each.accepts(content, tmp_path)

    attacked()


# What was found


@pytest.mark.parametrize("codes", [(0x110000, 97), (97, 0xD800), (0xFFFFFFFF, 0xFFFFFFFF)])
@pytest.mark.parametrize("order", "<>")
def test_group_labels_with_control_characters(tmp_path: Path, codes: tuple[int, int], order: str) -> None:
    images = tiny.opened(tmp_path / "images.npy", tiny.images(2))
    np.save(tmp_path / "groups.npy", np.array(codes, dtype=f"{order}u4").view(f"{order}U1"))
    rejects("no Unicode characters", group_ids, images, str(tmp_path / "groups.npy"))
    np.save(tmp_path / "groups.npy", np.array(["ä", "𝄞"], dtype=f"{order}U1"))
    assert len(set(group_ids(images, str(tmp_path / "groups.npy")).tolist())) == 2


def test_graph_whose_fault_cannot_be_printed() -> None:
    """The checker names an input that nothing gives, of which it can't make a text."""
    content = relu(of="none").SerializeToString().replace(b"none", b"\xf1one")
    said = "onnx.checker: it is not valid, and one of its names is no text in UTF-8"
    assert said in check_onnx(onnx.load_from_string(content))


def relu(of: str = "x") -> onnx.ModelProto:
    images, logits = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y"))
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", [of], ["y"], name="node")], "g", [images], [logits])
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)])
    model.metadata_props.add(key="made", value="text")
    return model


@pytest.mark.parametrize("text", [b"node", b"text", b"made", b"Relu"])
def test_graph_with_invalid_utf8(tmp_path: Path, text: bytes) -> None:
    content = relu().SerializeToString()
    (tmp_path / "m.onnx").write_bytes(content)
    assert read_onnx(tmp_path / "m.onnx").graph.node[0].name == "node"
    (tmp_path / "m.onnx").write_bytes(content.replace(text, b"\xf1" + text[1:]))
    rejects("no text in UTF-8", read_onnx, tmp_path / "m.onnx")


def test_unknown_element_type() -> None:
    model = relu()
    model.graph.input[0].type.tensor_type.elem_type = 55
    model.graph.initializer.add(name="w", data_type=55, dims=[1], raw_data=b"x")
    assert any(reason.startswith("onnx.checker: ") and "55" in reason for reason in check_onnx(model))


def test_messages_are_printable() -> None:
    assert message_line("no such option: --batch") == "no such option: --batch"
    assert message_line("word " + "n" * 10_000).endswith("... (10000 letters)")
    assert len(message_line("many words " * 1000)) <= LONGEST_MESSAGE


def test_no_output_is_written_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="no directory"):
        FILE.convert(str(tmp_path / "file" / "below" / "out.json"), None, None)
    assert FILE.convert(str(tmp_path / "new" / "out.json"), None, None) == tmp_path / "new" / "out.json"
