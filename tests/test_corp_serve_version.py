"""`package serve` on a running server from the command line: a release's samples, refusals, exit codes."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from click.testing import CliRunner, Result

from corp_deploy.cli import main
from export.triton.repository import write_repository
from export.triton.variants import Package
from tests.export_served import SHAPE, write_onnx
from tests.triton_server import Server, lack

REASON = lack()


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["package", "serve", *(str(word) for word in words)])


def release_of(graph: Path, folder: Path) -> Path:
    """A release's samples alone, with this graph's answers."""
    images = np.random.default_rng(1).standard_normal((3, *SHAPE)).astype(np.float32)
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    (folder / "samples").mkdir(parents=True)
    np.save(folder / "samples/images.npy", images)
    np.save(folder / "samples/answers.npy", session.run(["logits"], {"images": images})[0])
    graphs = {"reduced/model.onnx": {"expected": "samples/answers.npy", "max_relative_error": 1e-4}}
    record = {"kind": "corp-deploy/samples", "version": 1, "images": "samples/images.npy", "count": 3, "graphs": graphs}
    (folder / "samples/samples.json").write_text(json.dumps(record))
    return folder


def packaged(folder: Path) -> tuple[Path, dict[int, Path]]:
    graphs = {version: write_onnx(folder / f"{version}.onnx", seed=version) for version in (1, 2)}
    for version, graph in graphs.items():
        write_repository(Package(name="vit", version=version, cpu_onnx=graph), folder / "models")
    return folder / "models", graphs


@pytest.mark.slow("server")
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_server_is_rolled_and_a_version_with_other_answers_is_not_served(tmp_path: Path) -> None:
    repository, graphs = packaged(tmp_path)
    good, other = (release_of(graphs[version], tmp_path / f"release{version}") for version in (1, 2))
    with Server(repository, tmp_path) as server:
        assert server.load("vit_cpu") is None
        address = f"http://{server.http_address}"
        rolled = run(repository, "--model-version", 1, "--server", address, "--samples", good)
        assert rolled.exit_code == 0, rolled.output
        assert "vit_cpu serves version 1; relative error on the samples" in " ".join(rolled.output.split())
        refused = run(repository, "--model-version", 2, "--server", address, "--samples", good, "--json")
        assert refused.exit_code == 1
        assert "version 1 is still served" in json.loads(refused.stdout)["failure"]
        assert [entry["version"] for entry in server.statistics("vit_cpu")] == ["1"]
        assert run(repository, "--model-version", 2, "--server", address, "--samples", other).exit_code == 0


def test_bad_calls_change_nothing(tmp_path: Path) -> None:
    repository, graphs = packaged(tmp_path)
    before = (repository / "vit_cpu/config.pbtxt").read_bytes()
    release = release_of(graphs[1], tmp_path / "release")
    for words, told in (
        (("--samples", release), "give --server"),
        (("--timeout", 3), "give --server"),
        (("--server", "nowhere"), "expected an address such as"),
        (("--server", "http://127.0.0.1:9", "--timeout", 2), "is it running"),
        (("--server", "http://127.0.0.1:9", "--samples", tmp_path), "samples.json"),
    ):
        result = run(repository, "--model-version", 1, *words)
        assert (result.exit_code, told in result.output) == (2, True), result.output
    assert (repository / "vit_cpu/config.pbtxt").read_bytes() == before
