"""A slice of the files and calls of chance, the same in every run, and what larger runs of them found."""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.trust import bad_calls, spoilt_calls
from benchmarks.trust.fuzz import page
from benchmarks.trust.fuzz.one import changed
from benchmarks.trust.fuzz.readers import Readers, is_read, made_home, readers
from benchmarks.trust.fuzz.watch import Strayed, Watch
from calib.groups import group_ids
from corp_deploy.cli import main
from corp_deploy.commands.options import FILE
from export.graph.check import check_onnx
from ground.errors import BadInput
from ground.onnx_file import read_onnx
from ground.text import LONGEST_MESSAGE, message_line
from tests import tiny
from tests.refusals import rejects

READERS = ("moments", "model directories", "checkpoints", "recipes", "gate rules", "records", "config.pbtxt",
           "ONNX graphs", "images", "labels", "documents")  # fmt: skip
QUICK = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    made_home(root)
    return root


@pytest.fixture(scope="module")
def every(home: Path) -> Readers:
    return readers(home)


@pytest.mark.slow("graph")
def test_none_is_left_out(every: Readers) -> None:
    assert (tuple(every), len(every["records"])) == (READERS, 12)


@pytest.mark.parametrize("reader", READERS)
def test_a_whole_file_is_read(reader: str, every: Readers, tmp_path: Path) -> None:
    for each in every[reader]:
        assert any([is_read(each, content, tmp_path) for content in each.whole]), each.name  # noqa: C419 (all are tried)


@pytest.mark.parametrize(
    ("reader", "place"),
    [*((reader, None) for reader in READERS if reader != "records"), *(("records", place) for place in range(12))],
)
@given(data=st.data())
@QUICK
def test_whatever_it_holds(reader: str, place: int | None, data: st.DataObject, every: Readers, home: Path) -> None:
    """Of records each kind by itself, as often as all files of another reader."""
    each = data.draw(st.sampled_from(list(every[reader]))) if place is None else list(every[reader])[place]
    folder = home / f"tried-{reader.replace(' ', '-')}"
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Reading `.npy` or `.npz` file required additional header parsing")
        is_read(each, data.draw(changed(each)), folder)


def test_the_watch_finds_what_a_reader_must_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Callable[..., None]] = []
    monkeypatch.setattr("sys.addaudithook", hooks.append)
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    watch = Watch(at=tmp_path / "found.json", own=(str(tmp_path),))
    watch.begin()
    (see,) = hooks

    def refuses() -> bool:
        raise BadInput("as it should")

    def fails() -> bool:
        raise KeyError("shape")

    def strays() -> bool:
        with pytest.raises(Strayed):
            see("open", ("/etc/passwd", "r", 0))  # swallowed by the reader, and told all the same
        return True

    def starts() -> bool:
        see("subprocess.Popen", ("sh", [], None, None))
        return True

    def stays() -> bool:
        see("open", (str(tmp_path / "own"), "r", 0))
        see("open", (3, "r", 0))
        return True

    for reads in (refuses, fails, strays, starts, stays):
        watch.one("file", b"content", reads)
    kinds = [key.partition(" in ")[0] for key in watch.findings]
    assert kinds == ["file: KeyError", "file: Strayed", "file: Strayed"]
    assert (watch.inputs, watch.read) == (5, 2)


def test_the_page_is_what_the_records_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python -m benchmarks.trust.fuzz.page"


# What was found


@pytest.mark.parametrize("codes", [(0x110000, 97), (97, 0xD800), (0xFFFFFFFF, 0xFFFFFFFF)])
@pytest.mark.parametrize("order", "<>")
def test_labels_of_groups_that_are_no_letters(tmp_path: Path, codes: tuple[int, int], order: str) -> None:
    images = tiny.opened(tmp_path / "images.npy", tiny.images(2))
    np.save(tmp_path / "groups.npy", np.array(codes, dtype=f"{order}u4").view(f"{order}U1"))
    rejects("no letters", group_ids, images, str(tmp_path / "groups.npy"))
    np.save(tmp_path / "groups.npy", np.array(["ä", "𝄞"], dtype=f"{order}U1"))
    assert len(set(group_ids(images, str(tmp_path / "groups.npy")).tolist())) == 2


def test_a_graph_whose_fault_can_t_be_told() -> None:
    """The checker names an input that nothing gives, of which it can't make a text."""
    content = relu(of="none").SerializeToString().replace(b"none", b"\xf1one")
    said = "onnx.checker: it is not valid, and names what is no text in UTF-8"
    assert said in check_onnx(onnx.load_from_string(content))


def relu(of: str = "x") -> onnx.ModelProto:
    images, logits = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y"))
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", [of], ["y"], name="node")], "g", [images], [logits])
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)])
    model.metadata_props.add(key="made", value="text")
    return model


@pytest.mark.parametrize("text", [b"node", b"text", b"made", b"Relu"])
def test_a_graph_of_texts_that_are_none(tmp_path: Path, text: bytes) -> None:
    content = relu().SerializeToString()
    (tmp_path / "m.onnx").write_bytes(content)
    assert read_onnx(tmp_path / "m.onnx").graph.node[0].name == "node"
    (tmp_path / "m.onnx").write_bytes(content.replace(text, b"\xf1" + text[1:]))
    rejects("no text in UTF-8", read_onnx, tmp_path / "m.onnx")


def test_a_type_that_is_none() -> None:
    model = relu()
    model.graph.input[0].type.tensor_type.elem_type = 55
    model.graph.initializer.add(name="w", data_type=55, dims=[1], raw_data=b"x")
    assert any(reason.startswith("onnx.checker: ") and "55" in reason for reason in check_onnx(model))


def test_a_message_can_be_read() -> None:
    assert message_line("no such option: --batch") == "no such option: --batch"
    assert message_line("word " + "n" * 10_000).endswith("... (10000 letters)")
    assert len(message_line("many words " * 1000)) <= LONGEST_MESSAGE


def test_nothing_is_written_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="no directory"):
        FILE.convert(str(tmp_path / "file" / "below" / "out.json"), None, None)
    assert FILE.convert(str(tmp_path / "new" / "out.json"), None, None) == tmp_path / "new" / "out.json"


# Calls


@pytest.fixture(scope="module")
def calls_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("calls")
    spoilt_calls.made_spoilt(root)
    return root


def test_calls_that_cannot_go_well(calls_home: Path) -> None:
    """Those that are refused while the options are read need no models; every 16th of the calls is made."""
    calls = list(spoilt_calls.bad_calls(calls_home))
    assert len(calls) > 2500
    assert {call.command for call in calls} == set(spoilt_calls.good_calls(calls_home))
    for call in calls[::16]:
        told = bad_calls.judged(call, calls_home)
        assert "faults" not in told, told


def test_a_fault_of_a_call_is_told() -> None:
    good = CliRunner().invoke(main, ["doctor", "completion", "bash"])
    found = bad_calls.faults_of(good, {"kept": "a", "lost": "b"}, {"kept": "c", "new": "d"})
    assert found == ["exit code 0", "a message of 0 letters", "changed kept", "left new"]
