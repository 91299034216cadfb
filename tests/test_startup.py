"""Commands import only what they need, each run on small records or graphs in a new process."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from export.triton.repository import write_repository
from export.triton.variants import Package
from perf.record.runs import save_bench
from tests.export_served import SHAPE, write_onnx
from tests.histories import bench_of_release
from tests.pages import ROOT
from tests.small_release import release_of

HEAVY = {"onnxscript", "safetensors.torch", "timm", "torch", "torchvision", "transformers"}
OF_MODELS = {"corp_deploy.algebra", "corp_deploy.families", "corp_deploy.traced"}
OF_THE_COMPILER = {"onnx", "onnxruntime", "timm", "torch._dynamo", "torch._inductor", "torchvision"}
IMAGES = np.random.default_rng(0).standard_normal((4, *SHAPE), dtype=np.float32)
# The modules are looked at after each command; what one imports stays for those behind it.
RUN_ALL = """
import json, sys
from click.testing import CliRunner
from corp_deploy.cli import main
for name, words, code in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == code, (words, done.output)
    print(json.dumps([name, sorted(sys.modules)]))
"""
Calls = Sequence[tuple[str, Sequence[object], int]]


def imported_by(calls: Calls) -> dict[str, set[str]]:
    """Run commands one after another in a new process; by the name of each the modules that are imported behind it."""
    texts = json.dumps([(name, [*map(str, words)], code) for name, words, code in calls])
    command = [sys.executable, "-W", "ignore", "-c", RUN_ALL, texts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: set(modules) for name, modules in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bench records, graphs, images, a repository and a release."""
    root = tmp_path_factory.mktemp("startup")
    (root / "records").mkdir()
    for name in ("before.json", "records/bench.json"):
        save_bench(bench_of_release(0, 4.0), root / name)
    graph = write_onnx(root / "model.onnx")
    np.savez(root / "images.npz", images=IMAGES)
    write_repository(Package(name="vit", cpu_onnx=graph), root / "repository")
    release_of(graph, IMAGES, root / "release")
    return root


def test_record_commands_import_no_torch(home: Path) -> None:
    bench = home / "records" / "bench.json"
    calls: Calls = [
        ("bench compare", ["bench", "compare", home / "before.json", bench], 0),
        ("gate", ["gate", bench, "--fail-if", "speedup@b1 < 1.0"], 0),
        ("report", ["report", home / "records", "-o", home / "report.html"], 0),
        ("package lint", ["package", "lint", home / "repository"], 0),
        ("check", ["check", home / "release"], 0),
    ]
    for name, modules in imported_by(calls).items():
        assert not modules & HEAVY, name
        assert ("onnx" in modules) == (name in ("package lint", "check")), name


def test_graphs_are_timed_and_verified_without_torch(home: Path) -> None:
    graph, parity = home / "model.onnx", home / "parity.json"
    quick = ["--batch", 1, "--time-limit", 0.2, "--half-width", 0.9, "--min-rounds", 6, "--block-ms", 1]
    limit = ["--max-error", 1e-3, "--batch", 2, "-o", parity]
    calls: Calls = [
        ("verify of noise", ["verify", graph, graph, "--random", 4, *limit], 0),
        ("verify of images", ["verify", graph, graph, "--images", home / "images.npz", *limit], 0),
        ("bench", ["bench", graph, graph, "--names", "one,same", *quick, "-o", home / "own.json"], 0),
        ("gate", ["gate", parity], 0),
    ]
    for name, modules in imported_by(calls).items():
        assert not modules & (HEAVY | OF_MODELS), name


@pytest.mark.slow("process")
def test_doctor_imports_no_compiler() -> None:
    (modules,) = imported_by([("doctor", ["doctor", "--json"], 0)]).values()
    assert not modules & (OF_THE_COMPILER - {"onnxruntime"})


@pytest.mark.slow("process")
def test_inspecting_a_model_imports_neither_exporters_nor_loops() -> None:
    model = ROOT / "examples" / "digits" / "model"
    (modules,) = imported_by([("inspect", ["inspect", "--model", model], 0)]).values()
    own = {"corp_deploy.planning.budget", "corp_deploy.planning.probe", "corp_deploy.release.recipe_file"}
    assert not modules & {"onnx", "onnxruntime", "onnxscript", *own}
