"""The commands of corp-deploy whose results make the tables; a finished command is not run again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from corp_deploy.cli import main

Trials = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, calibration images, labelled held-out images, and the directory of the runs.

    `align`: multiples of widths. `batches`: those of latency and of throughput. `bench`: None times nothing.
    """

    name: str
    model: tuple[str, ...]
    calibration: Path
    held_out: Path
    labels: Path
    home: Path
    snapshots: tuple[int, ...]
    align: str = "mlp=64,head=16,conv=32"
    batches: tuple[int, ...] = (1, 16)
    time_limit: float = 5.0
    bench: str | None = "onnxruntime"

    @property
    def moments(self) -> Path:
        return self.home / "moments.safetensors"

    def moments_of(self, images: int) -> Path:
        return self.home / f"moments.{images}.safetensors"


def command(*words: object) -> dict[str, Any]:
    """Run a command and return its JSON. Raises RuntimeError with its message if it fails."""
    result = CliRunner().invoke(main, [*map(str, words), "--json"])
    if result.exit_code:
        raise RuntimeError(f"{' '.join(map(str, words))}: exit {result.exit_code}: {result.stderr[-2000:]}")
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def _kept(path: Path, *words: object) -> dict[str, Any]:
    if path.is_file():
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    made = command(*words)
    path.write_text(json.dumps(made))
    return made


def calibrated(subject: Subject) -> dict[str, Any]:
    """Calibrate in one pass with CORP's system and snapshots, and return the JSON of the command."""
    subject.home.mkdir(parents=True, exist_ok=True)
    snapshots = ("--snapshots", ",".join(map(str, subject.snapshots))) if subject.snapshots else ()
    words = ("--images", subject.calibration, "--attention-system", *snapshots, "-o", subject.moments)
    return _kept(subject.home / "calibrate.json", "calibrate", "--model", *subject.model, *words)


def swept(subject: Subject, name: str, *words: object, moments: Sequence[Path] = (), timed: bool = False) -> Trials:
    """Run a sweep, or continue a stopped one, and return its trials."""
    files = ",".join(map(str, moments or (subject.moments,)))
    judged = ("--images", subject.held_out, "--labels", subject.labels, "--align", subject.align)
    bench: tuple[object, ...] = ()
    if timed and subject.bench:
        batches = ",".join(map(str, subject.batches))
        bench = ("--bench", subject.bench, "--batch", batches, "--time-limit", subject.time_limit)
    into = ("-o", subject.home / name)
    trials: Trials = command("sweep", "--model", *subject.model, "--moments", files, *judged, *words, *bench, *into)[
        "trials"
    ]
    return trials


def dense_of(subject: Subject, name: str) -> dict[str, Any]:
    """Return the figures of the dense model in the sweep of this name."""
    found: dict[str, Any] = json.loads((subject.home / name / "sweep.json").read_text())["dense"]
    return found
