"""A real inference server on loopback: found, started, asked and stopped."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ENVIRONMENT = Path(sys.prefix) / "triton"
START_S, STOP_S, ASK_S = 60.0, 30.0, 30.0
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_PACKAGES = ENVIRONMENT / f"lib/python{_PYTHON}/site-packages"
_INSTALLED = _PACKAGES / "pytriton/tritonserver"


def lack() -> str | None:
    """Why no server can run here; None when one can."""
    stub = _INSTALLED / f"python_backend_stubs/{_PYTHON}/triton_python_backend_stub"
    library = sysconfig.get_config_var("INSTSONAME")
    if not (_INSTALLED / "bin/tritonserver").is_file():
        return "nvidia-pytriton, which carries the server, is not installed in .venv/triton (make setup)"
    if not stub.is_file():
        return f"the server's Python backend knows no Python {_PYTHON}"
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or not library:
        return "this Python was built without the shared library that the server's Python backend loads"
    return None


class Server:
    """A context manager; every model is loaded by name. Its Python backend runs in the environment of the tests."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.repository, self.folder = repository, folder
        self.log = folder / "server.log"
        self.http_port, self.grpc_port = _free_ports()
        self.exit_code: int | None = None

    @property
    def http_address(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def __enter__(self) -> Self:
        backend = self.folder / "backends/python"
        shutil.copytree(_INSTALLED / "backends/python", backend)
        shutil.copy2(_INSTALLED / f"python_backend_stubs/{_PYTHON}/triton_python_backend_stub", backend)
        (backend / "triton_python_backend_stub").chmod(0o755)
        command = [
            str(_INSTALLED / "bin/tritonserver"), f"--model-repository={self.repository}",
            f"--backend-directory={backend.parent}", "--model-control-mode=explicit", "--http-address=127.0.0.1",
            f"--http-port={self.http_port}", "--grpc-address=127.0.0.1", f"--grpc-port={self.grpc_port}",
            "--allow-metrics=false", "--exit-timeout-secs=10",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=_environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Asks it to end, and ends it when it does not; `exit_code` is 0 after a clean end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.exit_code = self.process.wait(STOP_S)

    def ask(self, path: str, *, post: bool = False, content: object = None) -> tuple[int, Any]:
        """Status and decoded answer of one request to the HTTP endpoint, `path` without /v2/."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=ASK_S)
        try:
            body = None if content is None else json.dumps(content)
            connection.request("POST" if post else "GET", f"/v2/{path}", body=body)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        return response.status, json.loads(text) if text else None

    def load(self, model: str) -> str | None:
        """Loads the model with the config that lies in the repository now; what the server says against it."""
        status, answer = self.ask(f"repository/models/{model}/load", post=True, content={})
        return None if status == 200 else str(answer["error"])

    def statistics(self, model: str) -> list[dict[str, Any]]:
        """One entry per loaded version."""
        status, answer = self.ask(f"models/{model}/stats")
        assert status == 200, answer
        entries: list[dict[str, Any]] = answer["model_stats"]
        return entries

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            try:
                if self.ask("health/ready")[0] == 200:
                    return
            except OSError:
                pass
            try:
                self.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            break
        raise AssertionError(f"the server was not ready within {START_S:.0f} s:\n{self.log.read_text()[-4000:]}")


def run_clients(server: Server, model: str, source: Path, target: Path) -> None:
    """tests/triton_clients.py against this server; writes `target`."""
    script = Path(__file__).with_name("triton_clients.py")
    addresses = [server.http_address, server.grpc_address]
    command = [str(ENVIRONMENT / "bin/python"), str(script), *addresses, model, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + server.log.read_text()[-2000:]


def _environment() -> dict[str, str]:
    """The embedded Python takes its packages from the first python3 on PATH: this environment's."""
    libraries = [str(_PACKAGES / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    return {
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.defpath}",
        "LD_LIBRARY_PATH": ":".join(libraries),
        "OMP_NUM_THREADS": "1",
    }


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
