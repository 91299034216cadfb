"""Packages of AOTInductor from `export` to a server's repository: facts, proof, timing, limits, and refusals."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import corp_deploy
from corp_deploy.invocation.running import RunOptions
from corp_deploy.proof.contender import contender_from_pt2
from corp_deploy.store import package_file
from corp_deploy.store.graph_facts import facts_of_graph
from corp_deploy.store.package_file import export_package
from export.graph.package_notes import KEY, PackageNotes, notes_of_package
from export.graph.ports import GraphPort
from export.triton.lint import lint_repository
from export.triton.repository import write_repository
from export.triton.variants import Package
from tests import tiny
from tests.command import invoked, refuses
from tests.export_served import PACKAGE_NOTES, config_of, replaced, write_onnx, write_package
from tests.refusals import rejects


def test_facts_of_a_package_are_read_without_loading_it(tmp_path: Path) -> None:
    facts = facts_of_graph(write_package(tmp_path / "m.pt2"))
    assert (facts.precision, facts.opset, facts.batch, facts.macs) == ("fp32", 0, None, 240)
    assert (facts.model_sha256, facts.compiled_for) == ("00", "AVX2")
    assert [(port.name, port.shape) for port in facts.inputs] == [("images", (3, 4, 4))]
    fixed = GraphPort(name="images", dtype="float32", shape=(4, 3, 4, 4))
    notes = PackageNotes(**{**_fields(PACKAGE_NOTES), "inputs": (fixed,)})
    assert facts_of_graph(write_package(tmp_path / "four.pt2", notes)).batch == 4


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda path: path.write_bytes(b"code"), "can't be read as a package"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "holds no program that AOTInductor compiled"),
        (lambda path: write_package(path, metadata={KEY: 3}), "has no export.package, so its ports are unknown"),
        (lambda path: write_package(path, metadata={KEY: "{}"}), "its metadata export.package"),
        (
            lambda path: write_package(path, PackageNotes(**{**_fields(PACKAGE_NOTES), "roles": {}})),
            "or no role for an output",
        ),
    ],
)
def test_files_without_notes_are_refused(tmp_path: Path, write: Callable[[Path], object], told: str) -> None:
    write(tmp_path / "m.pt2")
    rejects(rf"m\.pt2.*{told}", notes_of_package, tmp_path / "m.pt2")


def _fields(notes: PackageNotes) -> dict[str, Any]:
    return {name: getattr(notes, name) for name in PackageNotes.__slots__}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that serves a package and, beside it, a graph."""
    package, graph = write_package(tmp_path / "m.pt2"), write_onnx(tmp_path / "m.onnx")
    written = write_repository(Package(name="vit", cpu_onnx=graph, aoti=package), tmp_path / "repo")
    assert written.models == ("vit_cpu", "vit_aoti")
    assert any("vit_aoti: the platform torch_aoti is beta" in warning for warning in written.warnings)
    return tmp_path / "repo"


def test_package_is_served_by_places_without_batching(repository: Path) -> None:
    config = config_of(repository / "vit_aoti")
    assert (config.text("backend"), config.text("platform")) == ("pytorch", "torch_aoti")
    assert config.number("max_batch_size") == 0
    assert config.message("dynamic_batching") is None
    sides = [config.messages(side)[0] for side in ("input", "output")]
    assert [each.text("name") for each in sides] == ["INPUT__0", "OUTPUT__0"]
    assert [each.numbers("dims") for each in sides] == [(-1, 3, 4, 4), (-1, 5)]
    assert config.messages("instance_group")[0].text("kind") == "KIND_CPU"
    entry = json.loads((repository / "expected.json").read_text())["models"]["vit_aoti"]["1"]
    assert entry["outputs"] == {"OUTPUT__0": "logits"}
    assert (repository / "vit_aoti" / "1" / "model.pt2").is_file()
    assert lint_repository(repository) == ()


def test_package_for_a_gpu_is_served_on_one(tmp_path: Path) -> None:
    notes = PackageNotes(**{**_fields(PACKAGE_NOTES), "device": "cuda"})
    write_repository(Package(name="vit", aoti=write_package(tmp_path / "m.pt2", notes)), tmp_path / "repo")
    assert config_of(tmp_path / "repo" / "vit_aoti").messages("instance_group")[0].text("kind") == "KIND_GPU"
    assert lint_repository(tmp_path / "repo") == ()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("max_batch_size: 0", "max_batch_size: 8", "max_batch_size is 8: the platform torch_aoti is beta"),
        ("max_batch_size: 0", "max_batch_size: 0\nsequence_batching {}", "sequence_batching: the platform torch_aoti"),
        ("max_batch_size: 0", "max_batch_size: 0\ndynamic_batching {}", "dynamic_batching without batches"),
        ('"torch_aoti"', '"pytorch_libtorch"', "a platform that this tool doesn't know"),
        ('platform: "torch_aoti"\n', "", "known here with platform 'torch_aoti' only"),
        ('backend: "pytorch"', 'backend: "python"', "belongs to the backend 'pytorch'"),
        ('"INPUT__0"', '"images"', "input 'images': the server names tensors by their places"),
        ("dims: [-1, 3, 4, 4]", "dims: [-1, 3, 5, 5]", "INPUT__0 has dims [-1, 3, 4, 4] in model.pt2"),
        ("KIND_CPU", "KIND_GPU", "model.pt2 was compiled for cpu, got kind KIND_GPU"),
    ],
)
def test_lint_reports_what_the_platform_does_not_serve(repository: Path, old: str, new: str, told: str) -> None:
    replaced(repository / "vit_aoti" / "config.pbtxt", old, new)
    found = [each for each in lint_repository(repository) if told in each.what]
    assert [(each.severity, each.path.parent.name) for each in found] == [("error", "vit_aoti")], lint_repository(
        repository
    )


def test_names_of_arguments_begin_with_a_release(repository: Path) -> None:
    config = repository / "vit_aoti" / "config.pbtxt"
    for old, new in (("INPUT__0", "ARGS[0]"), ("INPUT__0", "ARGS[0]"), ("OUTPUT__0", "RESULT")):
        replaced(config, f'"{old}"', f'"{new}"')
    of = {tag: [each.what for each in lint_repository(repository, tag)] for tag in ("26.04", "26.05")}
    assert [any("by their places only" in what for what in whats) for whats in of.values()] == [True, False]


def test_releases_before_the_platform_are_reported(repository: Path, tmp_path: Path) -> None:
    def about_packages(tag: str) -> list[tuple[str, str]]:
        return [(each.severity, each.what) for each in lint_repository(repository, tag) if "pt2" in str(each.path)]

    ((severity, told),) = about_packages("26.02")
    assert severity == "error"
    assert "no platform torch_aoti, which begins with 26.03" in told
    ((severity, told),) = about_packages("26.04")
    assert severity == "warning"
    assert "compiled by torch 2.15.0 for AVX2" in told
    assert "container pytorch:26.04-py3" in told


def test_package_compiled_elsewhere_is_foreign_code(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(repository / ".state"))
    (found,) = lint_repository(repository)
    assert "native code that was not compiled here" in found.what
    assert "--trust-engine accepts it" in invoked("package", "lint", repository, code=1).stdout.replace("\n", " ")
    invoked("package", "lint", repository, "--trust-engine")
    package = repository / "vit_aoti" / "1" / "model.pt2"
    rejects(r"not compiled here.*--trust-engine", contender_from_pt2, "m", package, None, RunOptions())


def test_results_with_a_package_alone_are_served(tmp_path: Path) -> None:
    (tmp_path / "results" / "reduced").mkdir(parents=True)
    write_package(tmp_path / "results" / "reduced" / "model.pt2")
    done = invoked("package", tmp_path / "results", "-o", tmp_path / "repo", "--name", "vit", "--server", "26.04")
    assert "version 1 of vit_aoti" in done.stdout
    assert "container pytorch:26.04-py3" in done.stderr
    shutil.rmtree(tmp_path / "results" / "reduced")
    refuses("no such graph", "package", tmp_path / "results", "-o", tmp_path / "other")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.written(tmp_path_factory.mktemp("aoti"), 24)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--format", "aoti", "-o", "m.onnx"], "expected a name that ends in .pt2"),
        (["-o", "m.pt2"], "expected --format aoti for a .pt2"),
        (["--format", "aoti", "-o", "m.pt2", "--precision", "int8", "--images", "i.npy"], "one float type"),
        (["--format", "aoti", "-o", "m.pt2", "--precision", "mixed", "--keep-fp32", "head"], "has no effect on"),
        (["--format", "aoti", "-o", "m.pt2", "--opset", "20"], "--opset 20 has no effect on a package"),
        (["--format", "aoti", "-o", "m.pt2", "--break-fusion", "blocks.0"], "has no effect on a package"),
        (["-o", "m.onnx", "--device", "cuda"], "--device cuda has no effect on an ONNX graph"),
    ],
)
def test_options_that_packages_ignore_are_refused(dense: Path, tmp_path: Path, words: list[str], told: str) -> None:
    placed = [str(tmp_path / word) if word.startswith(("m.", "i.")) else word for word in words]
    refuses(told, "export", "--model", dense / "dense", *placed)
    assert not list(tmp_path.iterdir())


def test_missing_compiler_and_gpu_are_reported(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["export", "--model", dense / "dense", "--format", "aoti", "-o", tmp_path / "m.pt2"]
    with monkeypatch.context() as here:
        here.setattr(torch.cuda, "is_available", lambda: False)
        here.setattr(shutil, "which", lambda name: "/usr/bin/g++")
        refuses("a GPU was asked for and there is none", *words, "--device", "cuda", code=4)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refuses("needs a C++ compiler", *words, code=4)
    assert not (tmp_path / "m.pt2").exists()


class Counting:
    """A stand-in for a runner of a package whose answers depend on the size of the batch."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, feeds: Any) -> dict[str, Any]:
        rows = len(feeds["images"])
        return {"scores": np.full((rows, 5), float(rows), np.float32)}


def test_package_that_answers_by_the_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_it(model: nn.Module, path: Path, *ports: Any, **options: Any) -> PackageNotes:
        write_package(path)
        return PACKAGE_NOTES

    monkeypatch.setattr(package_file, "package_from_model", compile_it)
    monkeypatch.setattr(package_file, "PackageRunner", Counting)
    told = r"m\.pt2: compiled for any batch.*compile it for one size by --batch N"
    rejects(told, export_package, tiny.checkpoint(), tmp_path / "m.pt2", precision="fp32")
    assert not list(tmp_path.iterdir())


# From here on packages are compiled: one of the reduced model for any batch, one of the dense one for a single input.


@pytest.fixture(scope="module")
def compiled(dense: Path) -> Path:
    """The tiny model, reduced, as a package for any batch."""
    moments = corp_deploy.calibrate(dense / "dense", dense / "images.npy", dense / "moments.safetensors")
    corp_deploy.reduce(dense / "dense", moments, dense / "reduced", mlp=0.5, attn=0.5)
    invoked("export", "--model", dense / "reduced", "--format", "aoti", "-o", dense / "reduced" / "model.pt2")
    return dense / "reduced" / "model.pt2"


@pytest.mark.slow("models")
def test_reduced_model_is_compiled_proven_timed_and_packaged(compiled: Path, tmp_path: Path) -> None:
    home = compiled.parent.parent
    facts = facts_of_graph(compiled)
    assert (facts.batch, facts.precision) == (None, "fp32")
    assert facts.macs is not None
    assert facts.macs < facts_of_dense(home)
    assert facts.fitted is not None, "images of the calibration are recognised among those that judge"
    np.save(tmp_path / "held-out.npy", tiny.images(40, seed=1))
    steps = [home / "reduced", compiled]
    proof = corp_deploy.verify(
        home / "dense", steps, tmp_path / "held-out.npy", batches=(1, 7, 32), max_error=0.99, output=tmp_path / "p.json"
    )
    exact = next(link for link in proof.links if link.kind == "exact")
    assert exact.status == "PASS"
    assert exact.measures.relative_error < 1e-5
    assert "AOTInductor fp32" in exact.candidate
    bench = corp_deploy.bench(
        compiled, compiled, batches=(1, 3), time_limit=1.0, half_width=0.9, min_rounds=6, block_ms=2.0
    )
    described = bench.record.subjects[0].describe
    assert (described["backend"], described["compiled_batch"]) == ("aotinductor", "any from 1 to 1024")
    assert all(speedup is not None for speedup in bench.speedups.values())
    (tmp_path / "results").mkdir()
    shutil.copytree(home / "reduced", tmp_path / "results" / "reduced")
    invoked("package", tmp_path / "results", "-o", tmp_path / "repo", "--name", "vit")
    assert lint_repository(tmp_path / "repo") == ()


def facts_of_dense(home: Path) -> int:
    corp_deploy.export(home / "dense", home / "dense.onnx")
    macs = facts_of_graph(home / "dense.onnx").macs
    assert macs is not None
    return macs


@pytest.mark.slow("models")
def test_changed_package_is_foreign(compiled: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt2"
    other.write_bytes(compiled.read_bytes() + b"\0")
    images = compiled.parent.parent / "images.npy"
    rejects("not compiled here", corp_deploy.verify, compiled.parent, other, images)


@pytest.mark.slow("models")
@pytest.mark.parametrize(("precision", "bound"), [("fp16", 0.01), ("bf16", 0.1)])
def test_half_precision_of_one_batch_proves_itself(dense: Path, tmp_path: Path, precision: str, bound: float) -> None:
    made = corp_deploy.export(
        dense / "dense", tmp_path / f"m.{precision}.pt2", format="aoti", precision=precision, batch=2
    )
    assert (made.precision, made.opset) == (precision, 0)
    proof = corp_deploy.verify(dense / "dense", made, dense / "images.npy", max_error=bound)
    assert [link.status for link in proof.links] == ["PASS", "PASS"]
    assert proof.links[0].kind == "half"
