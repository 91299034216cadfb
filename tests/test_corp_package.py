"""corp-deploy package: server options in the configs, verdicts on the model, and `package serve` on a server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from export.triton.lint import lint_repository
from export.triton.pbtxt import parse
from export.triton.repository import write_repository
from export.triton.variants import Package
from ground.files import write_json
from perf.gate.gate import Gate, JudgedRule, Verdict
from perf.gate.verdicts import save_gate
from perf.parity.link import measure_link
from perf.parity.parity import ImageSet, Parity
from perf.parity.tolerance import user_tolerance
from tests.command import invoked
from tests.export_served import SHAPE, config_of, write_onnx
from tests.small_release import release_of
from tests.triton_server import Server, lack


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Make a directory of results with a graph and no measurement."""
    (tmp_path / "reduced").mkdir()
    write_onnx(tmp_path / "reduced" / "model.onnx")
    return tmp_path


def package(results: Path, *words: object, code: int = 0) -> Result:
    return invoked("package", results, "-o", results / "repo", *words, code=code)


@pytest.mark.parametrize(("backend", "key"), [("python", "intra_op_threads"), ("onnxruntime", "intra_op_thread_count")])
def test_server_settings_are_options(results: Path, backend: str, key: str) -> None:
    words = ["--queue-delay-us", 0, "--instances", 3, "--graph-batches", "1,16", "--policy", "all"]
    words += ["--cpu-backend", backend, "--cpu-threads", 2, "--batch", "1:4:8", "--batch", "1:16:32"]
    package(results, *words)
    cpu = config_of(results / "repo/vit_cpu")
    assert (cpu.text("backend"), cpu.number("max_batch_size")) == (backend, 8)
    assert (results / "repo/vit_cpu/1/model.py").exists() == (backend == "python")
    assert cpu.inner("dynamic_batching").number("max_queue_delay_microseconds", -1) == 0
    assert cpu.inner("instance_group").number("count") == 3
    assert cpu.inner("parameters").text("key") == key
    assert cpu.inner("parameters").inner("value").text("string_value") == "2"
    assert cpu.inner("version_policy").message("all") is not None
    pending = parse((results / "repo/vit_onnx/1/plan.config.pbtxt").read_text())
    assert pending.number("max_batch_size") == 32
    specs = pending.inner("optimization").inner("cuda").messages("graph_spec")
    assert [spec.number("batch_size") for spec in specs] == [1, 16]
    script = (results / "repo/vit_onnx/1/build_plan.sh").read_text()
    assert "--optShapes=images:4x3x4x4" in script
    assert "--optShapes=images:16x3x4x4" in script
    assert not any(each.severity == "error" for each in lint_repository(results / "repo"))


def test_defaults_change_nothing(results: Path) -> None:
    package(results, "--max-batch", 4)
    cpu = config_of(results / "repo/vit_cpu")
    assert (cpu.text("backend"), cpu.number("max_batch_size")) == ("python", 4)
    package(results, "--model-version", 2)
    cpu = config_of(results / "repo/vit_cpu")
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
def test_unservable_models_are_refused(results: Path, words: list[object], says: str) -> None:
    assert says in package(results, *words, code=2).output
    assert not (results / "repo").exists()


# Verdicts of the records beside the model


def write_verdicts(results: Path, *, parity: str | None = None, gate: Verdict | None = None) -> None:
    """Write records with these verdicts: a proof without limits is UNJUDGED."""
    if parity is not None:
        answers = np.random.default_rng(0).standard_normal((20, 5))
        bound = user_tolerance(max_error={"PASS": 0.1, "FAIL": 0.001}.get(parity))
        link = measure_link(
            name="onnx", kind="whole", reference="dense", candidate="reduced/model.onnx", reference_rows=answers,
            candidate_by_batch={4: answers * 1.01}, tolerance=bound,
        )  # fmt: skip
        proof = Parity(images=ImageSet(count=20, digest="sha256:00"), links=(link,))
        write_json(results / "parity.json", proof.to_json())
    if gate is not None:
        rule = JudgedRule(rule="speedup@b1 < 1.1", verdict=gate, message="1.02 measured", metric="speedup")
        save_gate(Gate(rules=(rule,)), results / "gate.json")


def proof_in(results: Path) -> Any:
    return json.loads((results / "repo/expected.json").read_text())["models"]["vit_cpu"]["1"]["proof"]


@pytest.mark.parametrize(
    ("verdicts", "names"),
    [
        ({"parity": "FAIL"}, "parity.json: FAIL (1 link judged) on 20 images: onnx: relative error"),
        ({"parity": "PASS", "gate": "FAIL"}, "gate.json: FAIL: speedup@b1 < 1.1: 1.02 measured"),
    ],
)
def test_failed_model_is_packaged_only_with_allow_failed(results: Path, verdicts: dict[str, Any], names: str) -> None:
    write_verdicts(results, **verdicts)
    message = " ".join(package(results, code=1).output.split())
    assert f"{results}: not packed, because its proof failed: {names}" in message
    assert "--allow-failed packs it all the same" in message
    assert not (results / "repo").exists()
    assert names in package(results, "--allow-failed").output
    assert any(f"{name}: {line}".startswith(names) for name, line in proof_in(results).items())


def test_one_failed_target_record_refuses_the_package(results: Path) -> None:
    write_verdicts(results, parity="FAIL")
    (results / "parity.json").rename(results / "parity.tensorrt.json")
    assert "parity.tensorrt.json: FAIL" in package(results, code=1).output


@pytest.mark.parametrize(
    ("verdicts", "warnings", "proof"),
    [
        (
            {"parity": "UNJUDGED", "gate": "INCONCLUSIVE"},
            ["parity.json: UNJUDGED (0 links judged", "gate.json: INCONCLUSIVE: speedup@b1 < 1.1"],
            {"parity.json": "UNJUDGED", "gate.json": "INCONCLUSIVE"},
        ),
        ({}, ["no parity.json: nothing shows that the model's answers agree"], {}),
        ({"parity": "PASS", "gate": "PASS"}, [], {"parity.json": "PASS", "gate.json": "PASS"}),
    ],
)
def test_models_that_did_not_fail_are_packaged_with_warnings(
    results: Path, verdicts: dict[str, Any], warnings: list[str], proof: dict[str, str]
) -> None:
    write_verdicts(results, **verdicts)
    output = package(results).output
    assert output.count("warning: ") == len(warnings)
    assert all(f"warning: {warning}" in output for warning in warnings), output
    assert {name: line.split()[0].rstrip(":") for name, line in proof_in(results).items()} == proof


# `package serve`: a version in a running server, checked on a release's samples

REASON = lack()


def serve(repository: Path, version: int, *words: object, code: int = 0) -> Result:
    return invoked("package", "serve", repository, "--model-version", version, *words, code=code)


def write_samples(graph: Path, folder: Path) -> Path:
    images = np.random.default_rng(1).standard_normal((3, *SHAPE)).astype(np.float32)
    return release_of(graph, images, folder, "reduced/model.onnx")


def write_packages(folder: Path) -> tuple[Path, dict[int, Path]]:
    """Write a repository of two versions, and return it with their graphs."""
    graphs = {version: write_onnx(folder / f"{version}.onnx", seed=version) for version in (1, 2)}
    for version, graph in graphs.items():
        write_repository(Package(name="vit", version=version, cpu_onnx=graph), folder / "models")
    return folder / "models", graphs


@pytest.mark.slow("server")
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_server_is_rolled_and_a_deviating_version_is_not_served(tmp_path: Path) -> None:
    repository, graphs = write_packages(tmp_path)
    good, other = (write_samples(graphs[version], tmp_path / f"release{version}") for version in (1, 2))
    with Server(repository, tmp_path) as server:
        assert server.load("vit_cpu") is None
        address = f"http://{server.http_address}"
        rolled = serve(repository, 1, "--server", address, "--samples", good)
        assert "vit_cpu serves version 1; relative error on the samples" in " ".join(rolled.output.split())
        refused = serve(repository, 2, "--server", address, "--samples", good, "--json", code=1)
        assert "version 1 is still served" in json.loads(refused.stdout)["failure"]
        assert [entry["version"] for entry in server.statistics("vit_cpu")] == ["1"]
        serve(repository, 2, "--server", address, "--samples", other)


def test_bad_calls_change_nothing(tmp_path: Path) -> None:
    repository, graphs = write_packages(tmp_path)
    before = (repository / "vit_cpu/config.pbtxt").read_bytes()
    release = write_samples(graphs[1], tmp_path / "release")
    for words, message in (
        (("--samples", release), "give --server"),
        (("--timeout", 3), "give --server"),
        (("--server", "nowhere"), "expected an address such as"),
        (("--server", "http://127.0.0.1:9", "--timeout", 2), "is it running"),
        (("--server", "http://127.0.0.1:9", "--samples", tmp_path), "samples.json"),
    ):
        assert message in serve(repository, 1, *words, code=2).output
    assert (repository / "vit_cpu/config.pbtxt").read_bytes() == before
