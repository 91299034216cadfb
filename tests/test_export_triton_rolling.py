"""Roll-overs to another version, in a real server under load and in a fake one that fails at each step."""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export.triton import versions
from export.triton.config import Serving
from export.triton.repository import write_repository
from export.triton.rolling import STAGED, Samples, roll
from export.triton.server import ServerError, TritonServer
from export.triton.variants import Package
from export.triton.versions import staging_folder, switch_version
from tests.command import invoked, refuses
from tests.doubles import some
from tests.export_served import CLASSES, SHAPE, write_onnx
from tests.graphs import session_of
from tests.refusals import rejects
from tests.triton_server import Server, lack

REASON = lack()
real = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SERVING = Serving(preferred_batches=(4,), queue_delay_us=1000, max_batch=8, cpu_threads=1)
RATE = 20


@dataclass
class Served:
    server: Server
    repository: Path
    graphs: dict[int, Path]

    @property
    def client(self) -> TritonServer:
        return TritonServer(address=f"http://{self.server.http_address}", timeout_s=30.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("rolling")
    graphs = {version: write_onnx(folder / f"{version}.onnx", seed=version) for version in (1, 2)}
    write_repository(Package(name="vit", cpu_onnx=graphs[1], serving=SERVING), folder / "models")
    with Server(folder / "models", folder) as server:
        assert server.load("vit_cpu") is None
        write_repository(Package(name="vit", version=2, cpu_onnx=graphs[2], serving=SERVING), folder / "models")
        yield Served(server, folder / "models", graphs)


def images(count: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, *SHAPE)).astype(np.float32)


def answers(graph: Path, batch: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(session_of(graph).run(["logits"], {"images": batch})[0])


def samples(graph: Path) -> Samples:
    batch = images(4, seed=9)
    return Samples(images=batch, answers=answers(graph, batch), max_relative_error=1e-3)


@dataclass
class Load:
    """A client that sends RATE requests a second, each in its own thread, and keeps the answers in order."""

    served: Served
    image: NDArray[np.float32] = field(default_factory=lambda: images(1, seed=3))
    got: list[Future[Any]] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._end = threading.Event()
        self._clock = threading.Thread(target=self._send)
        self._clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._clock.join()

    def _send(self) -> None:
        begun = time.monotonic()
        with ThreadPoolExecutor(1000) as pool:
            while not self._end.is_set():
                self.got.append(pool.submit(self._ask))
                self._end.wait(max(begun + len(self.got) / RATE - time.monotonic(), 0.0))

    def _ask(self) -> Any:
        entry = {"name": "images", "datatype": "FP32", "shape": [1, *SHAPE], "data": self.image.ravel().tolist()}
        try:
            status, answer = self.served.server.ask("models/vit_cpu/infer", post=True, content={"inputs": [entry]})
            return answer["outputs"][0]["data"] if status == 200 else answer
        except OSError as error:
            return repr(error)

    def versions(self) -> list[int]:
        """Return the version of each answer in the order sent, 0 for an answer of no version."""
        known = {version: answers(graph, self.image)[0] for version, graph in self.served.graphs.items()}
        return [
            next((v for v, wanted in known.items() if len(data) == CLASSES and np.allclose(data, wanted, atol=1e-4)), 0)
            for data in (each.result() for each in self.got)
        ]


def loaded(served: Served) -> tuple[int, ...]:
    return served.client.ready_versions("vit_cpu")


@pytest.mark.slow("server")
@real
def test_rolling_forward_and_back_under_load_loses_no_request(served: Served) -> None:
    with Load(served) as load:
        time.sleep(0.3)
        for version in (2, 1):
            rolled = roll(served.repository, "vit", version, served.client, samples(served.graphs[version]))
            assert rolled.failure is None
            assert rolled.served.models == ("vit_cpu",)
            assert rolled.errors["vit_cpu"] < 1e-5
            assert loaded(served) == (version,)
            time.sleep(0.3)
    versions = load.versions()
    assert len(versions) >= RATE
    assert 0 not in versions, [each.result() for each in load.got]
    assert {1, 2} <= {*versions}
    assert versions[0] == versions[-1] == 1
    assert sorted(path.name for path in served.repository.iterdir()) == ["expected.json", "vit_cpu"]


@pytest.mark.slow("server")
@real
def test_wrong_or_unloadable_version_is_never_served(served: Served) -> None:
    good, wrong = loaded(served), 2 if loaded(served) == (1,) else 1
    config = (served.repository / "vit_cpu/config.pbtxt").read_text()
    with Load(served) as load:
        rolled = roll(served.repository, "vit", wrong, served.client, samples(served.graphs[good[0]]))
        assert rolled.failure is not None
        assert "answers the samples with a relative error" in rolled.failure
        assert f"version {good[0]} is still served" in rolled.failure
        code = served.repository / "vit_cpu" / str(wrong) / "model.py"
        text = code.read_text()
        code.write_text("raise RuntimeError('broken')\n")
        broken = roll(served.repository, "vit", wrong, served.client)
        code.write_text(text)
        assert "broken" in some(broken.failure)
    assert set(load.versions()) == set(good)
    assert loaded(served) == good
    assert (served.repository / "vit_cpu/config.pbtxt").read_text() == config
    assert not (served.repository / f"vit_cpu{STAGED}").exists()


@pytest.mark.slow("server")
@real
def test_unloaded_model_is_refused(served: Served, tmp_path: Path) -> None:
    write_repository(Package(name="cat", cpu_onnx=served.graphs[1], serving=SERVING), tmp_path / "models")
    rejects("none of cat_cpu is loaded there", roll, tmp_path / "models", "cat", 1, served.client)
    rejects("has no version 7", roll, served.repository, "vit", 7, served.client)


class _Answers(BaseHTTPRequestHandler):
    """A server that redirects every GET, and refuses to load models as a server in poll mode does."""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", "http://127.0.0.1:9/")
        self.end_headers()

    def do_POST(self) -> None:
        body = b'{"error": "explicit model load / unload is not allowed if polling is enabled"}'
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None: ...


def test_other_addresses_are_never_contacted_and_refusals_are_reported() -> None:
    with HTTPServer(("127.0.0.1", 0), _Answers) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        client = TritonServer(address=f"http://127.0.0.1:{http.server_port}", timeout_s=5.0)
        rejects("302 Found", client.require_live)
        with pytest.raises(ServerError, match="503 Service Unavailable: explicit model load"):
            client.load("vit")
        http.shutdown()
        thread.join()
    rejects("is it running", client.require_live)


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "file:///etc/passwd", "http://", "http://a/v2", ""])
def test_invalid_addresses_are_refused(address: str) -> None:
    rejects("expected an address such as", TritonServer, address=address)


# Roll-overs in a fake server


@dataclass(frozen=True, slots=True, kw_only=True)
class Feigned(TritonServer):
    """A fake server that serves the versions in each model's config and refuses request number `fails` of `heard`."""

    repository: Path
    serving: dict[str, tuple[int, ...]]
    heard: list[str] = field(default_factory=list)
    fails: int = -1

    def _ask(self, path: str, content: object = None) -> Any:
        match path.split("/"):
            case ["repository", "index"]:
                ready = [(model, version) for model, versions in self.serving.items() for version in versions]
                return [{"name": model, "version": str(version), "state": "READY"} for model, version in ready]
            case ["repository", "models", model, verb]:
                config = (self.repository / model / "config.pbtxt").read_text()
                versions = tuple(int(each) for each in re.findall(r"versions: \[(.*?)\]", config)[0].split(","))
                self.heard.append(f"{verb} {model} {versions}")
                if len(self.heard) - 1 == self.fails:
                    raise ServerError("refused")
                self.serving[model] = versions if verb == "load" else ()
            case ["models", model, "versions", version, "ready"]:
                if int(version) not in self.serving[model]:
                    raise ServerError("not ready")
        return None


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    """Write versions 1 and 2 of two variants, and serve version 1."""
    repository = tmp_path / "models"
    for version in (1, 2):
        graph = write_onnx(tmp_path / f"{version}.onnx", seed=version)
        package = Package(name="vit", version=version, onnx=graph, cpu_onnx=graph, serving=SERVING)
        write_repository(package, repository)
    switch_version(repository, "vit", 1)
    return repository


def feigned(repository: Path, **more: Any) -> Feigned:
    serving: dict[str, tuple[int, ...]] = {"vit_onnx": (1,), "vit_cpu": (1,)}
    return Feigned(address="http://127.0.0.1:9", repository=repository, serving=serving, **more)


def configs(repository: Path) -> list[str]:
    return [(repository / model / "config.pbtxt").read_text() for model in ("vit_onnx", "vit_cpu")]


def test_version_is_staged_then_added_then_served_alone(packaged: Path) -> None:
    server = feigned(packaged)
    assert roll(packaged, "vit", 2, server).failure is None
    each = ("load {0}_staged (2,)", "unload {0}_staged (2,)", "load {0} (1, 2)", "load {0} (2,)")
    assert server.heard == [words.format(model) for model in ("vit_onnx", "vit_cpu") for words in each]
    assert server.serving == {"vit_onnx": (2,), "vit_cpu": (2,), "vit_onnx_staged": (), "vit_cpu_staged": ()}
    assert sorted(path.name for path in packaged.parent.iterdir()) == ["1.onnx", "2.onnx", "models"]


@pytest.mark.parametrize(("fails", "done"), [(0, 0), (2, 0), (3, 0), (4, 1), (7, 1)])
def test_failure_of_any_step_restores_the_served_version(packaged: Path, fails: int, done: int) -> None:
    before, server = configs(packaged), feigned(packaged, fails=fails)
    rolled = roll(packaged, "vit", 2, server)
    assert some(rolled.failure).endswith(": refused; version 1 is still served")
    assert len(rolled.served.models) == done
    assert [server.serving[model] for model in ("vit_onnx", "vit_cpu")] == [(2,)] * done + [(1,)] * (2 - done)
    assert configs(packaged)[done:] == before[done:]
    assert not list(packaged.glob(f"*{STAGED}"))


def test_obstacles_are_refused_before_anything_changes(packaged: Path) -> None:
    before, server = configs(packaged), feigned(packaged)
    (packaged / f"vit_cpu{STAGED}").mkdir()
    rejects(r"vit_cpu_staged: left by a killed roll-over", roll, packaged, "vit", 2, server)
    (packaged / f"vit_cpu{STAGED}").rmdir()
    config = packaged / "vit_cpu/configs/2.pbtxt"
    config.write_text(config.read_text().replace("version_policy", "policy"))
    rejects("names no specific version_policy", roll, packaged, "vit", 2, server)
    shutil.rmtree(packaged / "vit_cpu/2")
    rejects(r"vit_cpu/2: gone, though there is a config of it", roll, packaged, "vit", 2, server)
    assert server.heard == []
    assert configs(packaged) == before


def test_repository_on_its_own_disk_is_staged_inside(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with staging_folder(packaged) as folder:
        assert folder.parent == packaged.parent
    monkeypatch.setattr(versions, "_is_one_disk", lambda *_: False)
    with staging_folder(packaged) as folder:
        assert folder.parent == packaged
    assert roll(packaged, "vit", 2, feigned(packaged)).failure is None
    assert sorted(path.name for path in packaged.iterdir()) == ["expected.json", "vit_cpu", "vit_onnx"]
    with staging_folder(packaged.parent / "new/models") as folder:
        assert folder.parent == packaged.parent / "new", "the folder of a new repository is made beside it"


@pytest.mark.slow("server")
def test_serve_version_reports_kept_versions_and_refuses_a_bound_without_samples(packaged: Path) -> None:
    for path in (packaged / "vit_onnx/2", packaged / "vit_onnx/configs/2.pbtxt"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    words = ["package", "serve", str(packaged), "--model-version", "2"]
    said = invoked(*words)
    assert f"{packaged}: vit_cpu serves version 2" in said.output
    assert f"{packaged}: vit_onnx lacks version 2 and stays as it is" in said.output
    asked = (*words, "--server", "http://127.0.0.1:9", "--max-error", "0.1")
    refuses("--max-error judges answers to samples: give --samples", *asked)
