"""Packaged repositories in a real server: warm-up, batching, answers over HTTP and gRPC, and versions."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from export.graph.to_onnx import onnx_from_model, save_onnx
from export.triton.config import Serving
from export.triton.lint import lint_repository
from export.triton.repository import write_repository
from export.triton.server import DATA_TYPES
from export.triton.variants import Package
from export.triton.versions import switch_version
from ground.ports import LOGITS, OutputPort, Port, image_port
from tests.doubles import some
from tests.export_served import replaced, write_onnx, write_package, write_plan
from tests.export_text import CHANNELS, TOKENS, TextEncoder, in_torch, sentences, write_text_onnx
from tests.export_vit import Vit
from tests.graphs import session_of
from tests.triton_server import Server, lack, run_clients

REASON = lack()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.slow("server")]

CLASSES, SIZE, IMAGES = 10, 16, 96
LABELS = tuple(f"digit {index}" for index in range(CLASSES))
SERVING = Serving(preferred_batches=(4,), queue_delay_us=20_000, max_batch=8, cpu_threads=1)


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, its repository, and the graph of version 1 of vit."""

    server: Server
    repository: Path
    graph: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    graph, repository = folder / "vit.onnx", folder / "models"
    model = Vit(dim=32, heads=2, qk=8, v=16, hidden=48, depth=2, size=SIZE, classes=CLASSES, padded=True)
    save_onnx(onnx_from_model(model, [image_port((3, SIZE, SIZE))], [LOGITS], precision="fp32", metadata={}), graph)
    write_repository(Package(name="vit", cpu_onnx=graph, labels=LABELS, serving=SERVING), repository)
    with Server(repository, folder) as server:
        yield Served(server, repository, graph)
    assert server.exit_code == 0, server.log.read_text()[-2000:]
    with socket.socket() as after:
        assert after.connect_ex(("127.0.0.1", server.http_port)) != 0, "the port is closed"


def images(count: int) -> Any:
    return np.random.default_rng(5).standard_normal((count, 3, SIZE, SIZE)).astype(np.float32)


def direct(graph: Path, batch: Any) -> Any:
    """Run the graph in ONNX Runtime, one image at a time."""
    session = session_of(graph)
    return np.concatenate([session.run(["logits"], {"images": image[None]})[0] for image in batch])


def request(**feed: Any) -> dict[str, object]:
    """Return the body of a KServe inference request."""
    inputs = [
        {"name": name, "datatype": DATA_TYPES[each.dtype.name], "shape": [*each.shape], "data": each.ravel().tolist()}
        for name, each in feed.items()
    ]
    return {"inputs": inputs}


def infer(server: Server, model: str, **feed: Any) -> dict[str, Any]:
    status, answer = server.ask(f"models/{model}/infer", post=True, content=request(**feed))
    assert status == 200, answer
    return {each["name"]: np.reshape(each["data"], each["shape"]) for each in answer["outputs"]}


@pytest.mark.slow("graph")
def test_server_warms_up_batches_and_answers_like_onnxruntime(served: Served, tmp_path: Path) -> None:
    server = served.server
    assert lint_repository(served.repository) == ()
    assert server.load("vit_cpu") is None
    assert server.ask("models/vit_cpu/ready")[0] == 200
    (before,) = server.statistics("vit_cpu")
    warmed = {entry["batch_size"]: entry["compute_infer"]["count"] for entry in before["batch_stats"]}
    assert warmed == {1: 1, 4: 1, 8: 1}, "one warm-up for each size, before any request"

    batch = images(IMAGES)
    np.save(tmp_path / "images.npy", batch)
    run_clients(server, "vit_cpu", tmp_path / "images.npy", tmp_path / "answers.npz")
    with np.load(tmp_path / "answers.npz") as opened:
        answers = dict(opened)
    wanted = direct(served.graph, batch)
    np.testing.assert_allclose(answers["logits"], wanted, rtol=0, atol=1e-5)
    assert answers["labels"].tolist() == [LABELS[index] for index in wanted.argmax(1)]

    (after,) = server.statistics("vit_cpu")
    sent = int(answers["requests"])
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == sent
    assert after["inference_count"] - before["inference_count"] == 2 * IMAGES
    executions = after["execution_count"] - before["execution_count"]
    assert executions < sent, "requests of different clients ran together"
    assert max(entry["batch_size"] for entry in after["batch_stats"]) <= SERVING.max_batch


def test_malformed_request_is_refused_and_the_next_one_served(served: Served) -> None:
    server = served.server
    assert server.load("vit_cpu") is None
    for wrong, told in ((images(9), "batch-size must be <= 8"), (images(1)[..., 1:], "unexpected shape")):
        status, answer = server.ask("models/vit_cpu/infer", post=True, content=request(images=wrong))
        assert status == 400
        assert told in answer["error"]
    np.testing.assert_allclose(
        infer(server, "vit_cpu", images=images(2))["logits"], direct(served.graph, images(2)), atol=1e-5
    )


def test_versions_roll_forward_and_back_in_a_running_server(served: Served, tmp_path: Path) -> None:
    server, batch = served.server, images(2)
    newer = write_onnx(tmp_path / "newer.onnx", shape=(3, SIZE, SIZE), classes=CLASSES)
    write_repository(Package(name="vit", version=2, cpu_onnx=newer, labels=LABELS, serving=SERVING), served.repository)
    for change, version, graph in ((None, "2", newer), (1, "1", served.graph)):
        if change is not None:
            switch_version(served.repository, "vit", change)
        assert server.load("vit_cpu") is None
        assert [entry["version"] for entry in server.statistics("vit_cpu")] == [version]
        np.testing.assert_allclose(infer(server, "vit_cpu", images=batch)["logits"], direct(graph, batch), atol=1e-4)


@pytest.mark.slow("graph")
def test_several_inputs_are_served_like_torch(served: Served, tmp_path: Path) -> None:
    server, graph = served.server, write_text_onnx(tmp_path / "text.onnx")
    write_repository(Package(name="text", cpu_onnx=graph, serving=SERVING), served.repository)
    assert server.load("text_cpu") is None
    metadata = server.ask("models/text_cpu")[1]
    assert metadata["inputs"] == [
        {"name": name, "datatype": "INT64", "shape": [-1, TOKENS]} for name in ("input_ids", "attention_mask")
    ]
    assert metadata["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, CHANNELS]}]
    assert [entry["batch_size"] for entry in server.statistics("text_cpu")[0]["batch_stats"]] == [1, 4, 8]

    before = server.statistics("text_cpu")[0]["execution_count"]
    feeds = [sentences(1 + index % 3, seed=index) for index in range(12)]
    with ThreadPoolExecutor(len(feeds)) as pool:
        answers = list(pool.map(lambda feed: infer(server, "text_cpu", **feed)["embedding"], feeds))
    for feed, answer in zip(feeds, answers, strict=True):
        np.testing.assert_allclose(answer, in_torch(TextEncoder(), feed)[0], rtol=0, atol=1e-5)
    assert server.statistics("text_cpu")[0]["execution_count"] - before < len(feeds), "requests ran together"

    one = dict(list(sentences(2).items())[:1])
    status, answer = server.ask("models/text_cpu/infer", post=True, content=request(**one))
    assert (status, "expected 2 inputs but got 1" in answer["error"]) == (400, True), answer


class Gated(nn.Module):
    """A model with an input of every type that graphs take."""

    def forward(self, x: Tensor, keep: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        kept = x.masked_fill(~keep, 0.0)
        return kept.sum(1) * counts.to(x.dtype), kept


@pytest.mark.slow("graph")
def test_every_input_type_and_several_outputs_are_served(served: Served, tmp_path: Path) -> None:
    inputs = [
        Port(name="x", shape=(6, 4)),
        Port(name="keep", shape=(6, 4), dtype="bool"),
        Port(name="counts", shape=(1,), dtype="int32"),
    ]
    outputs = [LOGITS, OutputPort(name="kept", role="feature map")]
    save_onnx(onnx_from_model(Gated(), inputs, outputs, precision="fp32", metadata={}), tmp_path / "gated.onnx")
    package = Package(name="gated", cpu_onnx=tmp_path / "gated.onnx", labels=tuple("abcd"))
    write_repository(package, served.repository)
    assert served.server.load("gated_cpu") is None
    rng = np.random.default_rng(0)
    x, keep = rng.standard_normal((3, 6, 4)).astype(np.float32), rng.integers(0, 2, (3, 6, 4)).astype(bool)
    counts = rng.integers(1, 9, (3, 1)).astype(np.int32)
    answers = infer(served.server, "gated_cpu", x=x, keep=keep, counts=counts)
    np.testing.assert_allclose(answers["kept"], x * keep, rtol=1e-6)
    np.testing.assert_allclose(answers["logits"], (x * keep).sum(1) * counts, rtol=0, atol=1e-4)


def test_fixed_batch_graph_is_served_at_that_batch(served: Served, tmp_path: Path) -> None:
    graph = write_onnx(tmp_path / "fixed.onnx", batch=2)
    write_repository(Package(name="fixed", cpu_onnx=graph), served.repository)
    assert served.server.load("fixed_cpu") is None
    batch = images(2)[..., :4, :4]
    wanted = session_of(graph).run(["logits"], {"images": np.ascontiguousarray(batch)})[0]
    np.testing.assert_allclose(infer(served.server, "fixed_cpu", images=batch)["logits"], wanted, atol=1e-5)
    status, answer = served.server.ask("models/fixed_cpu/infer", post=True, content=request(images=batch[:1]))
    assert (status, "unexpected shape" in answer["error"]) == (400, True)


def test_plan_config_is_accepted_up_to_the_absent_backend(served: Served, tmp_path: Path) -> None:
    graph = write_onnx(tmp_path / "model.onnx")
    plans = tuple(write_plan(tmp_path / f"{sm}.plan", graph, target=sm) for sm in ("86", "89"))
    serving = Serving(preferred_batches=(4, 8), graph_batches=(1, 4), policy="specific")
    labels = tuple("abcde")
    write_repository(Package(name="gpu", plans=plans, onnx=graph, labels=labels, serving=serving), served.repository)
    for model, backend in (("gpu", "tensorrt"), ("gpu_onnx", "onnxruntime")):
        told = served.server.load(model)
        assert told is not None
        assert f"unable to find backend library for backend '{backend}'" in told, told
    config = served.repository / "gpu/config.pbtxt"
    for old, new, wrong in (("graph_spec", "graf_spec", "graf_spec"), ("[4, 8]", "[4, 99]", "preferred")):
        text = config.read_text()
        config.write_text(text.replace(old, new))
        told = served.server.load("gpu")
        config.write_text(text)
        assert told is not None
        assert "backend library" not in told, "a wrong config is refused before its backend is looked up"
        assert wrong in told + served.server.log.read_text()


def test_package_config_is_accepted_up_to_the_absent_backend(served: Served, tmp_path: Path) -> None:
    """A server without the PyTorch backend reads the config; one before 26.03 refuses its platform and nothing else."""
    write_repository(Package(name="net", aoti=write_package(tmp_path / "m.pt2")), served.repository)
    absent = "unable to find backend library for backend 'pytorch'"
    told = served.server.load("net_aoti")
    assert told is not None
    if absent not in told:
        said = "unexpected 'platform' and 'backend' pair, got:torch_aoti, pytorch"
        assert said in served.server.log.read_text(), told
        print(f"a server of a release before 26.03: {said}; the package isn't served here")
        replaced(served.repository / "net_aoti" / "config.pbtxt", 'platform: "torch_aoti"\n', "")
        told = served.server.load("net_aoti")
    assert told is not None
    assert absent in told, told


def test_server_without_onnxruntime_names_the_package(served: Served, tmp_path: Path) -> None:
    repository = served.repository
    graph = write_onnx(tmp_path / "model.onnx")
    write_repository(Package(name="lost", cpu_onnx=graph), repository)
    code = repository / "lost_cpu/1/model.py"
    code.write_text(code.read_text().replace("import onnxruntime as ort", "import onnxruntime_not_here as ort"))
    told = served.server.load("lost_cpu")
    assert "pip install onnxruntime" in some(told)
