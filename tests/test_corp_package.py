"""corp-deploy package: what its options say to a server stands in the configs."""

from pathlib import Path

import pytest
from click.testing import Result

from export.triton.lint import lint_repository
from export.triton.pbtxt import Message, parse
from tests.command import invoked
from tests.export_served import write_onnx


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A directory of results with a graph and no measurement."""
    (tmp_path / "reduced").mkdir()
    write_onnx(tmp_path / "reduced" / "model.onnx")
    return tmp_path


def package(results: Path, *words: object, code: int = 0) -> Result:
    return invoked("package", results, "-o", results / "repo", *words, code=code)


def config_of(path: Path) -> Message:
    return parse(path.read_text())


@pytest.mark.parametrize(("backend", "key"), [("python", "intra_op_threads"), ("onnxruntime", "intra_op_thread_count")])
def test_what_a_server_is_told_is_an_option(results: Path, backend: str, key: str) -> None:
    words = ["--queue-delay-us", 0, "--instances", 3, "--graph-batches", "1,16", "--policy", "all"]
    words += ["--cpu-backend", backend, "--cpu-threads", 2, "--batch", "1:4:8", "--batch", "1:16:32"]
    package(results, *words)
    cpu = config_of(results / "repo/vit_cpu/config.pbtxt")
    assert (cpu.text("backend"), cpu.number("max_batch_size")) == (backend, 8)
    assert (results / "repo/vit_cpu/1/model.py").exists() == (backend == "python")
    assert cpu.inner("dynamic_batching").number("max_queue_delay_microseconds", -1) == 0
    assert cpu.inner("instance_group").number("count") == 3
    assert cpu.inner("parameters").text("key") == key
    assert cpu.inner("parameters").inner("value").text("string_value") == "2"
    assert cpu.inner("version_policy").message("all") is not None
    pending = config_of(results / "repo/vit_onnx/1/plan.config.pbtxt")
    assert pending.number("max_batch_size") == 32
    specs = pending.inner("optimization").inner("cuda").messages("graph_spec")
    assert [spec.number("batch_size") for spec in specs] == [1, 16]
    script = (results / "repo/vit_onnx/1/build_plan.sh").read_text()
    assert "--optShapes=images:4x3x4x4" in script
    assert "--optShapes=images:16x3x4x4" in script
    assert not any(each.severity == "error" for each in lint_repository(results / "repo"))


def test_without_options_nothing_changes(results: Path) -> None:
    package(results, "--max-batch", 4)
    cpu = config_of(results / "repo/vit_cpu/config.pbtxt")
    assert (cpu.text("backend"), cpu.number("max_batch_size")) == ("python", 4)
    package(results, "--model-version", 2)
    cpu = config_of(results / "repo/vit_cpu/config.pbtxt")
    assert cpu.number("max_batch_size") == 8
    assert cpu.inner("dynamic_batching").number("max_queue_delay_microseconds") == 500
    assert cpu.inner("version_policy").inner("latest").number("num_versions") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--graph-batches", "16", "--max-batch", 8], "CUDA graph of batch 16 is beyond the largest batch 8"),
        (["--batch", "8:4:16"], "1 <= min <= opt <= max"),
        (["--instances", 0], "a whole number from 1 to 1024"),
        (["--policy", "newest"], "'newest' is not one of 'latest', 'all', 'specific'"),
    ],
)
def test_what_can_not_be_served_is_refused(results: Path, words: list[object], says: str) -> None:
    assert says in package(results, *words, code=2).output
    assert not (results / "repo").exists()
