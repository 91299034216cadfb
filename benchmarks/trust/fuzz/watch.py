"""What a reader did with a file: an answer, BadInput, or what nobody wants of it; counted, and kept by kind."""

import base64
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ground.errors import BadInput
from ground.files import write_text

ROOT = Path(__file__).resolve().parents[3]
SLOW_S = 5.0
"""CPU seconds that no file of this size may take."""
HEADROOM_BYTES = 3 * 2**30
"""Address space that a reader may take beyond what the libraries have."""
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect",
          "socket.getaddrinfo", "ctypes.dlopen")  # fmt: skip
KEPT_BYTES = 4096


class Strayed(Exception):
    """A reader opened, started or asked what is none of its own."""


@dataclass(slots=True)
class Watch:
    """The counts of one reader under one driver; `at` is written as they go."""

    at: Path
    own: tuple[str, ...]
    inputs: int = 0
    read: int = 0
    slowest_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    _on: bool = False
    _strayed: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """From here on the process's memory is bounded, and what it opens is seen."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGESIZE") + HEADROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        sys.addaudithook(self._seen)

    def _seen(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event in STARTS or (event == "open" and self._is_foreign(arguments[0])):
            self._strayed.append(f"{event} {arguments[0]!s:.200}")
            raise Strayed(self._strayed[-1])

    def _is_foreign(self, path: object) -> bool:
        if not isinstance(path, str | bytes):
            return False
        self._on = False
        try:
            real = os.path.realpath(os.fsdecode(path))
        finally:
            self._on = True
        return not real.startswith(self.own)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._on, self._strayed = True, []
        try:
            yield
        finally:
            self._on = False
        if self._strayed:
            raise Strayed(self._strayed[0])

    def one(self, name: str, content: bytes, reads: Any) -> None:
        """`reads()` says whether the file was taken. What it raises otherwise is a finding."""
        self.inputs += 1
        begun = time.process_time()
        try:
            with self._looking():
                self.read += bool(reads())
        except BadInput:
            pass
        except Exception as error:
            self._keep(name, content, error)
        took = time.process_time() - begun
        self.slowest_s = max(self.slowest_s, took)
        if took > SLOW_S:
            self._keep(name, content, TimeoutError(f"{took:.1f} s"))
        if self.inputs % 1000 == 0:
            self.save()

    def _keep(self, name: str, content: bytes, error: Exception) -> None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/benchmarks/trust/fuzz/" not in f.filename]
        own = [f for f in frames if f.filename.startswith(str(ROOT))] or frames
        where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "none"
        key = f"{name}: {type(error).__name__} in {where}"
        new = key not in self.findings
        entry = self.findings.setdefault(
            key, {"count": 0, "message": str(error)[:300], "input": base64.b64encode(content[:KEPT_BYTES]).decode()}
        )
        entry["count"] += 1
        if new:
            write_text(self.at.with_suffix(f".{len(self.findings)}.txt"), "".join(traceback.format_exception(error)))
            self.at.with_suffix(f".{len(self.findings)}.bin").write_bytes(content)
            self.save()

    def save(self) -> None:
        """Where `at` says."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        counts = {"inputs": self.inputs, "read": self.read, "seconds": round(time.monotonic() - self.began, 1)}
        limits = {"slowest_s": round(self.slowest_s, 3), "peak_mib": round(peak)}
        write_text(self.at, json.dumps({**counts, **limits, "findings": self.findings}))
