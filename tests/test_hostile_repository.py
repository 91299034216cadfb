"""Repositories of other people: whatever would run code in the server or lead it elsewhere is an error of the lint."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from corp_deploy.cli import main
from export.triton.lint import lint_repository
from export.triton.lint_artifact import RULES, LintFinding
from export.triton.repository import write_repository
from export.triton.variants import BACKEND_MODEL, Package
from tests.export_served import CLASSES, replaced, write_onnx, write_plan


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """vit (a plan), vit_onnx, vit_cpu (this tool's model.py), with labels."""
    graph = write_onnx(tmp_path / "model.onnx")
    package = Package(
        name="vit",
        plans=(write_plan(tmp_path / "m.plan", graph),),
        onnx=graph,
        cpu_onnx=graph,
        labels=tuple(f"class {index}" for index in range(CLASSES)),
    )
    write_repository(package, tmp_path / "repo")
    assert lint_repository(tmp_path / "repo") == ()
    return tmp_path / "repo"


def errors(repository: Path, path: str) -> list[LintFinding]:
    found = lint_repository(repository)
    assert {each.rule for each in found} <= RULES.keys()
    return [each for each in found if each.severity == "error" and each.path == repository / path]


FILES = {
    "vit/1/libtriton_tensorrt.so": "a library",
    "vit/libtriton_tensorrt.so": "a library",
    "vit_onnx/1/libtriton_onnxruntime.so.1": "a library",
    "vit/1/batchstrategy.so": "a library",
    "vit/1/PLUGIN.DLL": "a library",
    "vit_onnx/1/model.py": "code that this tool didn't write",
    "vit_cpu/1/numpy.py": "code that this tool didn't write",
    "vit_cpu/1/numpy/__init__.py": "code that this tool didn't write",
    "vit_cpu/1/onnxruntime.pyc": "code that this tool didn't write",
    "vit_cpu/1/model.pth": "code that this tool didn't write",
}


@pytest.mark.parametrize("name", FILES)
def test_executable_repository_files_are_found(repository: Path, name: str) -> None:
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_bytes(b"import os\n")
    found = errors(repository, name)
    assert [FILES[name] in each.what for each in found] == [True]
    assert found[0].remedy


def test_only_our_own_model_py_is_accepted(repository: Path) -> None:
    own = repository / "vit_cpu/1/model.py"
    assert own.read_bytes() == BACKEND_MODEL.read_bytes()
    own.write_bytes(own.read_bytes()[:-1] + b" ")
    assert errors(repository, "vit_cpu/1/model.py")


def test_links_and_pipes_are_found(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("x")
    (repository / "vit/1/labels.txt").unlink()
    (repository / "vit/1/labels.txt").symlink_to(tmp_path / "canary")
    (repository / "vit_onnx/2").symlink_to(tmp_path)
    os.mkfifo(repository / "vit_cpu/1/pipe")
    (tmp_path / "vit_linked").mkdir()
    (repository / "linked").symlink_to(tmp_path / "vit_linked")
    for path, told in {
        "vit/1/labels.txt": "a link",
        "vit_onnx/2": "a link",
        "vit_cpu/1/pipe": "neither file",
        "linked": "a link",
    }.items():
        assert any(told in each.what for each in errors(repository, path)), path


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


CONFIGS = {
    parameter("EXECUTION_ENV_PATH", "/tmp/env.tar.gz"): "'EXECUTION_ENV_PATH' names code or a path",
    parameter("TRITON_BATCH_STRATEGY_PATH", "x"): "'TRITON_BATCH_STRATEGY_PATH' names code",
    parameter("op_library_filename", "ops.so"): "'op_library_filename' names code",
    parameter("CPU_EXTENSION_PATH", "x"): "'CPU_EXTENSION_PATH' names code",
    parameter("anything", "libx.so.3"): "'anything' names code",
    parameter("anything", "/etc/passwd"): "'anything' leads out of the model",
    parameter("anything", "a/../../b"): "'anything' leads out of the model",
    'platform: "pytorch_libtorch"\n': "a platform that this tool doesn't know",
    'runtime: "libfoo.so"\n': "runtime names the library",
    'model_repository_agents { agents { name: "x" } }\n': "model_repository_agents loads code",
    'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" '
    'parameters { key: "trt_engine_cache_path" value: "/tmp" } } } }\n': "'trt_engine_cache_path' names code or a path",
    'default_model_filename: "../../secret.onnx"\n': "default_model_filename '../../secret.onnx' leads out",
    'cc_model_filenames { key: "8.6" value: "/x.plan" }\n': "cc_model_filenames '/x.plan' leads out",
    'model_warmup { name: "w" inputs { key: "images" value { data_type: TYPE_FP32 dims: [3, 4, 4] '
    'input_data_file: "../x" } } }\n': "input_data_file '../x' leads out",
}


@pytest.mark.parametrize("text", CONFIGS)
def test_dangerous_config_settings_are_found(repository: Path, text: str) -> None:
    path = repository / "vit_onnx" / "config.pbtxt"
    written = path.read_text()
    path.write_text(written + text)
    found = [each for each in errors(repository, "vit_onnx/config.pbtxt") if CONFIGS[text] in each.what]
    assert len(found) == 1, lint_repository(repository)
    assert found[0].line in range(written.count("\n") + 1, path.read_text().count("\n") + 2)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"1/labels.txt"', '"../../labels.txt"', "label_filename '../../labels.txt' leads out"),
        ('"1/labels.txt"', '"/etc/passwd"', "label_filename '/etc/passwd' leads out"),
        ('backend: "onnxruntime"', 'backend: "evil"', "a backend that this tool doesn't know, 'evil'"),
    ],
)
def test_changed_config_is_found(repository: Path, old: str, new: str, told: str) -> None:
    replaced(repository / "vit_onnx" / "config.pbtxt", old, new)
    assert any(told in each.what for each in errors(repository, "vit_onnx/config.pbtxt")), lint_repository(repository)


def test_huge_config_is_not_read(repository: Path) -> None:
    with (repository / "vit_onnx" / "config.pbtxt").open("r+b") as file:
        file.truncate(2**33)
    found = errors(repository, "vit_onnx/config.pbtxt")
    assert [each.what for each in found] == ["it has 8589934592 bytes, 1048576 at most are read"]


def test_vulnerable_server_release_gives_a_warning(repository: Path) -> None:
    run: Callable[..., object] = CliRunner().invoke
    done = run(main, ["package", "lint", str(repository), "--server", "26.05"])
    told = " ".join(done.stdout.split())  # type: ignore[attr-defined]
    assert done.exit_code == 0, "a warning"  # type: ignore[attr-defined]
    assert "tritonserver:26.05-py3 has published holes, closed in 26.07" in told
    for name in ("CVE-2026-47606", "CVE-2026-47627", "CVE-2026-47630", "CVE-2026-16497"):
        assert name in told
    assert "CVE-2026-24207" not in told
    assert not [each for each in lint_repository(repository, "26.07") if "holes" in each.what]
    written = write_repository(
        Package(name="new", onnx=write_onnx(repository.parent / "n.onnx"), server="25.06"), repository
    )
    assert any("CVE-2025-23319" in warning for warning in written.warnings)


def test_lint_runs_nothing_of_the_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "vit_cpu/1/model.py").write_text("raise SystemExit('run')\n")
    before = set(sys.modules)
    assert CliRunner().invoke(main, ["package", "lint", str(repository)]).exit_code == 1
    assert not {name for name in set(sys.modules) - before if "model" in name and "triton" not in name}
