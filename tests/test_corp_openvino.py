"""OpenVINO in the commands: bench, verify and a recipe's target, on a tiny model."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corp_deploy.proof.candidates import candidate_from_path, in_runtime
from corp_deploy.release.baseline import Baseline
from corp_deploy.release.recipe import Recipe
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.stages import stages_of
from corp_deploy.release.targets import ReleaseTarget, missing_to_run
from ground.precision import BFLOAT16, FLOAT16, FLOAT32
from perf.runners.openvino import OpenVinoRunner
from tests import tiny
from tests.command import invoked, refuses
from tests.recipes import recipe

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
QUICK = ("--batch", 2, "--time-limit", 0.5, "--half-width", 0.9, "--min-rounds", 6, "--block-ms", 2, "--threads", 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("home"), 8, depth=1)
    for precision in ("fp32", "fp16"):
        invoked("export", "--model", root / "dense", "--precision", precision, "-o", root / f"{precision}.onnx")
    return root


@pytest.mark.slow("graph")
@needs_openvino
@pytest.mark.parametrize("dense", ["fp32.onnx", "dense"])
def test_bench_times_graphs_and_model_directories_in_openvino(home: Path, tmp_path: Path, dense: str) -> None:
    invoked("bench", home / dense, home / "fp16.onnx", "--backend", "openvino", *QUICK, "-o", tmp_path / "b.json")
    subjects = json.loads((tmp_path / "b.json").read_text())["subjects"]
    assert all(each["macs"] for each in subjects)
    keys = ("backend", "precision", "computed_in")
    described = [[each["describe"][key] for key in keys] for each in subjects]
    assert described == [["openvino", "fp32", "fp32"], ["openvino", "mixed", "fp32"]]


@pytest.mark.slow("graph")
@needs_openvino
def test_verify_judges_every_graph_in_openvino_beside_onnx_runtime(home: Path, tmp_path: Path) -> None:
    words = ["verify", home / "dense", home / "fp32.onnx", home / "fp16.onnx", "--images", home / "images.npy"]
    invoked(*words, "--runtime", "openvino", "--batch", "1,4", "-o", tmp_path / "p.json")
    links = json.loads((tmp_path / "p.json").read_text())["links"]
    kinds = [(link["candidate"].split("/")[-1], link["kind"], link["status"]) for link in links[:4]]
    assert kinds == [
        ("fp32.onnx ONNX fp32", "exact", "PASS"),
        ("fp32.onnx OpenVINO fp32", "exact", "PASS"),
        ("fp16.onnx ONNX fp16", "half", "PASS"),
        ("fp16.onnx OpenVINO fp16", "half", "PASS"),
    ]
    assert [link["reference"].split("/")[-1] for link in links[1:4]] == ["fp32.onnx ONNX fp32"] * 3
    assert links[1]["measures"]["relative_error"] < 1e-5


class Wrong(OpenVinoRunner):
    """An OpenVINO with a wrong kernel."""

    def __call__(self, feeds: Any) -> Any:
        return {name: 1.01 * rows for name, rows in OpenVinoRunner.__call__(self, feeds).items()}


@needs_openvino
def test_faulty_kernel_fails_only_its_runtimes_link(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corp_deploy.proof.candidates.OpenVinoRunner", Wrong)
    words = ["verify", home / "dense", home / "fp32.onnx", "--images", home / "images.npy", "--batch", "2"]
    invoked(*words, "--runtime", "openvino", "-o", tmp_path / "p.json", code=1)
    record = json.loads((tmp_path / "p.json").read_text())
    assert [link["status"] for link in record["links"][:2]] == ["PASS", "FAIL"]
    assert not record["located"], "blocks are compared in ONNX Runtime, which is right"


def test_runtime_without_a_graph_is_refused(home: Path, tmp_path: Path) -> None:
    words = ("verify", home / "dense", home / "dense", "--random", 2, "--runtime", "openvino", "-o", tmp_path / "p")
    refuses("there is none among the candidates", *words)


def test_missing_openvino_names_the_package(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    graph = home / "fp32.onnx"
    for words in (
        ("bench", graph, graph, "--backend", "openvino", "--batch", 1),
        ("verify", home / "dense", graph, "--random", 2, "--runtime", "openvino"),
    ):
        refuses("pip install 'corp-deploy[openvino]'", *words, "-o", tmp_path / "record.json", code=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "runtime", "label", "float_type"),
    [
        ("fp32", "openvino", "OpenVINO fp32", FLOAT32),
        ("fp32", "openvino-bf16", "OpenVINO fp32 in bf16", BFLOAT16),
        ("fp16", "openvino", "OpenVINO fp16", FLOAT16),
        ("fp16", "openvino-fp16", "OpenVINO fp16 in fp16", FLOAT16),
        ("fp16", "openvino-bf16", "OpenVINO fp16 in bf16", BFLOAT16),
    ],
)
def test_graph_is_judged_by_its_coarsest_type(home: Path, file: str, runtime: Any, label: str, float_type: Any) -> None:
    step = in_runtime(candidate_from_path(home / f"{file}.onnx"), runtime)
    assert step.label.endswith(f"{file}.onnx {label}")
    assert step.float_type is float_type
    assert not step.emulated
    assert runtime in step.name


def load_openvino_recipe(tmp_path: Path, **target: str) -> Recipe:
    """Write and load a recipe with a target for OpenVINO."""
    tables: dict[str, Any] = {
        "reduce": {"mlp": 0.5},
        "export": {"precisions": ["fp32", "bf16"]},
        "bench": {"threads": 2},
    }
    (tmp_path / "recipe.toml").write_text(recipe({**tables, "targets.openvino": target}))
    return load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    ("target", "graph"), [({}, "model.onnx"), ({"precision": "bf16"}, "model.bf16.onnx")], ids=["fp32", "bf16"]
)
def test_recipe_benches_each_target_in_its_precision(tmp_path: Path, target: dict[str, str], graph: str) -> None:
    loaded, dtype = load_openvino_recipe(tmp_path, **target), target.get("precision", "fp32")
    command = f"bench dense/{graph} reduced/{graph} --backend openvino --dtype {dtype} --threads 2"
    commands = {stage.name: stage.command for stage in stages_of(loaded, tmp_path, Baseline())}
    assert command in commands["bench.openvino"]


def test_openvino_target_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target: ReleaseTarget = load_openvino_recipe(tmp_path).targets[0]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing_to_run(target) == "openvino is not installed here; pip install 'corp-deploy[openvino]'"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    assert missing_to_run(target) is None
