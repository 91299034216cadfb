"""The linter finds nothing in a valid repository, and each planted fault in its file and on its line."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from export.triton.config import Serving
from export.triton.lint import lint_repository
from export.triton.lint_artifact import RULES, LintFinding
from export.triton.pbtxt import ParseError, parse
from export.triton.repository import write_repository
from export.triton.variants import Package
from tests.export_served import CLASSES, replaced, write_onnx, write_plan
from tests.refusals import rejects


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write vit, vit_onnx and vit_cpu with plans for two GPUs, profile 1:4:16, labels and CUDA graphs."""
    folder = tmp_path_factory.mktemp("packaged")
    graph = write_onnx(folder / "model.onnx")
    package = Package(
        name="vit",
        plans=tuple(write_plan(folder / f"{sm}.plan", graph, target=sm) for sm in ("86", "89")),
        onnx=graph,
        cpu_onnx=graph,
        labels=tuple(f"class {index}" for index in range(CLASSES)),
        serving=Serving(preferred_batches=(4,), graph_batches=(1, 4), cpu_threads=1),
    )
    write_repository(package, folder / "repo")
    return folder / "repo"


@pytest.fixture
def repository(packaged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packaged, tmp_path / "repo"))


def test_packaged_repository_is_clean(repository: Path) -> None:
    assert lint_repository(repository) == ()


def test_half_replaced_version_is_reported(repository: Path) -> None:
    (repository / ".former").mkdir()
    (told,) = lint_repository(repository)
    assert (told.severity, told.path) == ("error", repository)
    assert "killed" in told.what
    assert "restores" in told.remedy


WARM = 'model_warmup {\n  name: "batch_16"\n  batch_size: 16'
# Text of vit's config, its replacement, the line of the finding, and words of the finding and of its remedy.
FAULTS = {
    "name": ('name: "vit"', 'name: "vid"', '"vid"', "the directory 'vit'", 'name: "vit"'),
    "dtype": ("TYPE_FP32", "TYPE_FP16", "TYPE_FP16", "is TYPE_FP32", "TYPE_FP32"),
    "dims": ("dims: [3, 4, 4]", "dims: [3, 4, 5]", "[3, 4, 5]", "has dims", "dims: [3, 4, 4]"),
    "dims with the batch": ("dims: [3, 4, 4]", "dims: [-1, 3, 4, 4]", "[-1, 3", "has dims", "without the batch"),
    "classes": ("dims: [5]", "dims: [6]", "[6]", "logits has dims [5]", "dims: [5]"),
    "input name": ('name: "images"', 'name: "image"', "input {", "no input", "name it as"),
    "beyond the profile": (
        "max_batch_size: 16", "max_batch_size: 32", "max_batch_size", "batches up to 16", "max_batch_size: 16"
    ),
    "below the profile": ("max_batch_size: 16", "max_batch_size: 8", "max_batch_size", "though", "max_batch_size: 16"),
    "no batching": ("max_batch_size: 16", "max_batch_size: 0", "dynamic_batching", "without batches", "remove it"),
    "preferred": (
        "preferred_batch_size: [4]", "preferred_batch_size: [4, 17]", "17]", "preferred batch 17", "up to 16"
    ),
    "warm-up beyond": (WARM, WARM.replace(": 16", ": 99"), "99", "has batch 99", "sizes that the model takes"),
    "warm-up cold": (
        WARM, WARM.replace(": 16", ": 4"), "model_warmup", "no warm-up for batch 16", "model_warmup entry"
    ),
    "warm-up dims": (
        "dims: [3, 4, 4]\n      zero_data", "dims: [3, 4]\n      zero_data", "[3, 4]\n", "gives images dims [3, 4]",
        "dims: [3, 4, 4]"
    ),
    "warm-up data": ("      zero_data: true\n", "", "    value {", "has no data", "zero_data: true"),
    "warm-up input": ('key: "images"', 'key: "pixels"', "model_warmup", "'pixels', which is no", "fill images"),
    "graph beyond": (
        "graph_spec {\n      batch_size: 4", "graph_spec {\n      batch_size: 64",
        "graph_spec {\n      batch_size: 64", "graph for batch 64", "up to 16"
    ),
    "missing plan": (
        'value: "model.sm86.plan"', 'value: "model.sm87.plan"', "cc_model_filenames", "model.sm87.plan is missing",
        "build or package"
    ),
    "wrong GPU": ('key: "8.6"', 'key: "8.0"', "cc_model_filenames", "was built for SM 86", "of that GPU"),
    "capability": ('key: "8.6"', 'key: "sm86"', "cc_model_filenames", "not like", "write it so"),
    "labels": ('"1/labels.txt"', '"names.txt"', "names.txt", "names.txt is missing", "labels again"),
    "policy": (
        "latest {\n    num_versions: 1", "specific {\n    versions: [3]", "versions: [3]",
        "version 3 is to be served, on disk are 1", "version that is there"
    ),
    "typo": (
        "max_queue_delay_microseconds: 500", "max_queue_delay_ms: 500", "max_queue_delay_ms",
        "nearest known is 'max_queue_delay_microseconds'", "correct or remove"
    ),
    "kind of value": ("max_batch_size: 16", 'max_batch_size: "16"', '"16"', "whole number", "correct"),
    "backend": ('backend: "tensorrt"', 'backend: "python"', '"python"', "belongs", "right"),
    "CPU": ("KIND_GPU", "KIND_CPU", "KIND_CPU", "don't run on the CPU", "KIND_GPU"),
    "unclosed": ("input {", "input", '  name: "images"', "expected ':' or '{'", "correct"),
}  # fmt: skip
WARNINGS = ("below the profile", "warm-up cold")


@pytest.mark.parametrize("kind", FAULTS)
def test_planted_fault_is_found_on_its_line(repository: Path, kind: str) -> None:
    old, new, line, told, remedy = FAULTS[kind]
    path = repository / ("vit_onnx" if kind == "no batching" else "vit") / "config.pbtxt"
    replaced(path, old, new)
    text = path.read_text()
    found = [each for each in lint_repository(repository) if each.path == path and told in each.what]
    assert {each.rule for each in lint_repository(repository)} <= RULES.keys()
    assert len({each.line for each in found}) == 1, lint_repository(repository)
    assert len(found) <= 2, "at most one for each of the two plans"
    starts = [text[: match.start()].count("\n") + 1 for match in re.finditer(re.escape(line), text)]
    assert found[0].line in starts, (found[0], starts)
    assert found[0].severity == ("warning" if kind in WARNINGS else "error")
    assert remedy in found[0].remedy


def overwrite(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda repository: (repository / name).write_bytes(content)


def rename(name: str, to: str) -> Callable[[Path], object]:
    return lambda repository: (repository / name).rename(repository / to)


def unlink(name: str) -> Callable[[Path], object]:
    return lambda repository: (repository / name).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "config": (unlink("vit/config.pbtxt"), "vit", "config.pbtxt is missing"),
    "model.py": (unlink("vit_cpu/1/model.py"), "vit_cpu/1", "model.py is missing"),
    "onnx": (unlink("vit_onnx/1/model.onnx"), "vit_onnx/1", "model.onnx is missing"),
    "plan": (overwrite("vit/1/model.sm86.plan", b"x"), "vit/1/model.sm86.plan", "its bytes are not those"),
    "record": (
        overwrite("vit/1/model.sm86.plan.json", b"{}"),
        "vit/1/model.sm86.plan.json",
        "expected an engine record",
    ),
    "no record": (unlink("vit/1/model.sm86.plan.json"), "vit/1/model.sm86.plan", "there is no record"),
    "cut graph": (overwrite("vit_onnx/1/model.onnx", b"\x08\x0a"), "vit_onnx/1/model.onnx", "cut short"),
    "labels": (overwrite("vit/1/labels.txt", b"a\nb\n"), "vit/1/labels.txt", "2 labels for 5 outputs"),
    "zero": (rename("vit_onnx/1", "vit_onnx/01"), "vit_onnx/01", "without leading zeros"),
    "no version": (rename("vit_onnx/1", "vit_onnx/one"), "vit_onnx", "no version directory"),
    "binary config": (overwrite("vit/config.pbtxt", b"\xff\xfe"), "vit/config.pbtxt", "not text"),
}


@pytest.mark.parametrize(("damage", "path", "told"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_file_is_found(repository: Path, damage: Callable[[Path], object], path: str, told: str) -> None:
    damage(repository)
    found = [each for each in lint_repository(repository) if told in each.what]
    assert {each.rule for each in found} <= RULES.keys()
    assert [each.path for each in found] == [repository / path], lint_repository(repository)
    assert found[0].remedy


def test_graphs_that_contradict_the_config_are_found(repository: Path) -> None:
    write_onnx(repository / "vit_onnx/1/model.onnx", batch=2)
    write_onnx(repository / "vit_cpu/1/model.onnx", batch=2)
    found = [each for each in lint_repository(repository) if "takes batches of 2 only" in each.what]
    assert {each.path.parent.name for each in found} == {"vit_onnx", "vit_cpu"}
    assert all("max_batch_size: 0" in each.remedy for each in found)


def test_profile_with_minimum_above_one_is_found(tmp_path: Path) -> None:
    graph = write_onnx(tmp_path / "model.onnx")
    plan = write_plan(tmp_path / "model.plan", graph, profiles=("2:4:16",))
    written = write_repository(Package(name="vit", plans=(plan,)), tmp_path / "repo")
    assert written.warnings == ("vit: requests of fewer than 2 fail; build the profile from 1 on",)
    assert any("a request of one is refused" in each.what for each in lint_repository(tmp_path / "repo"))


def test_versions_are_checked_against_a_server_release(tmp_path: Path) -> None:
    graph = write_onnx(tmp_path / "model.onnx", opset=23, ir=11)
    plan = write_plan(tmp_path / "model.plan", graph, version="11.4.0.106")
    write_repository(Package(name="vit", plans=(plan,), onnx=graph, cpu_onnx=graph), tmp_path / "repo")
    assert lint_repository(tmp_path / "repo") == ()
    found = lint_repository(tmp_path / "repo", server="25.01-trtllm-python-py3")
    files = {(each.path.name, each.severity) for each in found}
    assert files == {("model.plan", "warning"), ("model.onnx", "warning"), ("repo", "warning")}
    told = "\n".join(map(str, found))
    assert "opset 23" in told
    assert "IR version 11" in told
    assert "10.8.0.43: it will not load" in told
    assert not any("vit_cpu" in str(each) for each in found), "the Python backend brings its own ONNX Runtime"


def test_only_served_versions_are_checked_against_the_config(repository: Path, tmp_path: Path) -> None:
    bigger = write_onnx(tmp_path / "other.onnx", seed=1)
    write_repository(Package(name="vit", version=2, onnx=bigger, serving=Serving(max_batch=64)), repository)
    (repository / "vit_onnx/1/model.onnx").unlink()
    assert lint_repository(repository) == ()
    replaced(repository / "vit_onnx/config.pbtxt", "latest {\n    num_versions: 1\n  }", "all { }")
    assert ["model.onnx is missing" in each.what for each in lint_repository(repository)] == [True]


def test_configs_of_other_tools_are_read(tmp_path: Path) -> None:
    """The config has a platform but no backend, no version policy, comments, older brackets and open dims."""
    model = tmp_path / "repo/net"
    (model / "1").mkdir(parents=True)
    write_onnx(model / "1/model.onnx")
    (model / "config.pbtxt").write_text(
        "# by hand\nplatform: 'onnxruntime_onnx'\nmax_batch_size: 8\n"
        "input [ { name: 'images', data_type: TYPE_FP32, dims: [ 3, -1, -1 ] } ]\n"
        "output < name: 'logits' data_type: TYPE_FP32 dims: 5 >;\n"
        "model_warmup [{ name: 'w' batch_size: 1 inputs { key: 'images' "
        "value: { data_type: TYPE_FP32 dims: [3, 4, 4] random_data: true } } }]\n"
    )
    assert lint_repository(tmp_path / "repo") == ()


def test_other_directories_are_refused(tmp_path: Path) -> None:
    rejects("no such directory", lint_repository, tmp_path / "absent")
    rejects("no model directory", lint_repository, tmp_path)


def test_finding_is_printed_like_a_compiler_message() -> None:
    finding = LintFinding(Path("a/config.pbtxt"), "error", "it is wrong", "mend it", 3)
    assert str(finding) == "a/config.pbtxt:3: error: it is wrong; mend it"


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("a {\n b: 1\n", 3, "or '}', opened on line 1"),
        ("a: 1\n}", 2, "expected a field name, got '}'"),
        ("a: [1 2]", 1, "expected ',' or ']'"),
        ("\n\na 5", 3, "expected ':' or '{' after a"),
        ("a: ]", 1, "expected a value of a"),
        ('a: "open\n', 1, "missing ending quote"),
        ("a: 12abc", 1, "expected a value of a, got '12abc'"),
        ("a:", 1, "got 'the end of the file'"),
    ],
)
def test_syntax_error_names_its_line(text: str, line: int, told: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert caught.value.line == line
    assert told in caught.value.what
