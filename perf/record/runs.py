"""The record of one `bench`: raw samples of two subjects, block by block, and a description of the machine.

It is a JSON object of kind "bench" with the fields of `Bench`. It stores no statistics (perf.stats computes them), and
null means unknown.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from ground.errors import BadInput
from ground.files import write_json
from ground.quantity import quoted
from ground.records import record_from_file

from .energy import EnergyRun
from .states import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedInputs:
    """Counts of the `judging` inputs that a model was fitted to (`same`) or that look like such inputs (`alike`)."""

    judging: int
    same: int
    alike: int = 0
    noun: str = "images"

    def __post_init__(self) -> None:
        if min(self.same, self.alike) < 0 or self.same + self.alike > self.judging:
            raise BadInput(f"fitted: got {self.same} and {self.alike} of {self.judging} {self.noun}, expected no more")

    @property
    def has_overlap(self) -> bool:
        return self.same + self.alike > 0

    @property
    def clause(self) -> str:
        return f", {self.same} of which the model was fitted to" if self.same else ""

    @property
    def sentence(self) -> str:
        alike = f", {self.alike} of which look like {self.noun} that it was fitted to" if self.alike else ""
        return f"the model is judged on {self.judging} {self.noun}{self.clause}{alike}"

    @property
    def warning(self) -> str:
        return f"{self.sentence}; judge it on {self.noun} that calibration never saw"


KIND, VERSION = "bench", 1
AGAIN = "make the record again with `corp-deploy bench`"
MOST_MS = 1e12
LEAST_MS = 1e-9  # a shorter time is no measurement, and its rate overflows
_PROFILE = re.compile(r"[0-9]{1,9}:[0-9]{1,9}:[0-9]{1,9}")
Status = Literal["ok", "oom", "failed", "out of time"]
OUT_OF_TIME: Literal["out of time"] = "out of time"
# Words for a subject without times, by its status.
FARED: Mapping[Status, str] = {"oom": "ran out of memory", "failed": "failed", OUT_OF_TIME: "was not measured"}
Scalar = str | int | float | bool | None
Flat = Mapping[str, Scalar]

# Latencies are comparable only on the same machine with the same settings.
ENERGY = "energy"
"""The key of `Bench.settings` with the name of the energy sensor, or the reason why energy was not measured."""
ENVIRONMENT_MUST_MATCH = (
    "system", "machine", "cpu", "cpu_count", "cpu_quota", "cpu_governor",
    "gpu", "gpu_count", "sm", "driver", "cuda", "power_limit_w", "clocks",
)  # fmt: skip
SETTINGS_MUST_MATCH = ("streams", "flush_l2")
DESCRIBE_MAY_DIFFER = ("model",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBlock(Block):
    """Consecutive timed calls of one subject.

    `at_s` counts from the row's start. `end_to_end_ms` is None if it equals `compute_ms`. `lost_ms` is the time per
    call that threads waited for a CPU.
    """

    at_s: float
    calls: int
    wall_ms: float
    compute_ms: tuple[float, ...]
    end_to_end_ms: tuple[float, ...] | None = None
    enqueue_ms: float | None = None
    lost_ms: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        times = (self.wall_ms, *self.compute_ms, *(self.end_to_end_ms or ()))
        if self.calls < 1 or not all(LEAST_MS < ms < MOST_MS for ms in times):
            raise BadInput(f"a block needs calls and positive times; {self.subject}, round {self.round} has {times}")
        lengths = {len(each) for each in (self.compute_ms, self.end_to_end_ms, self.lost_ms) if each is not None}
        if len(lengths) > 1:
            raise BadInput(
                f"a block has as many times of each kind as calls; {self.subject}, round {self.round} has {lengths}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTrial:
    """Warm-up and memory of one subject at one batch size, or the reason why it could not run."""

    status: Status
    message: str | None = None
    warm_up_samples_ms: tuple[float, ...] = ()
    warm_up_flat: bool = False
    peak_memory_bytes: int | None = None
    peak_memory_method: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Measurements at one batch size.

    `stop` is why it ended: narrow, time limit, round limit, one subject only, nothing to measure, or out of time; with
    several launches, all reasons, joined with commas.
    `noise_blocks` time the reference against itself, `repeat_blocks` one batch against varied ones. `left_out` lists
    parts for which time or memory ran out. `energy` is None without a sensor.
    """

    batch: int
    trials: Mapping[str, BenchTrial]
    calls_per_block: int
    settle_calls: int
    stop: str
    blocks: tuple[TimedBlock, ...]
    noise_blocks: tuple[TimedBlock, ...]
    repeat_blocks: Mapping[str, tuple[TimedBlock, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    energy: EnergyRun | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise BadInput(f"a row needs a batch size of at least 1, got {self.batch}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRecord:
    """A recorded subject; `device_memory` has bytes of an engine's weights and activations by profile min:opt:max."""

    name: str
    describe: Flat
    macs: int | None = None
    params: int | None = None
    size_bytes: int | None = None
    sha256: str | None = None
    fused_attention: int | None = None
    sparse_layers: int | None = None
    plan_bytes: int | None = None
    device_memory: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        strange = [key for key in self.device_memory or {} if not _PROFILE.fullmatch(key)]
        if strange:
            raise BadInput(f"{self.name}: device memory of {quoted(strange[0])}, expected profiles such as 1:8:64")

    def device_memory_at(self, batch: int) -> int | None:
        for profile, size in (self.device_memory or {}).items():
            sizes = [int(part) for part in profile.split(":")]
            if sizes[0] <= batch <= sizes[-1]:
                return size
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The whole record; the first subject is the reference, and `fitted` is None if the inputs were noise."""

    created: str
    command: tuple[str, ...]
    environment: Flat
    settings: Flat
    subjects: tuple[SubjectRecord, SubjectRecord]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]
    fitted: FittedInputs | None = None

    def __post_init__(self) -> None:
        names = [subject.name for subject in self.subjects]
        if len(set(names)) != 2:
            raise BadInput(f"a record holds two subjects of different names, got {names}")
        for row in self.rows:
            strange = {block.subject for block in row.blocks} - set(names)
            if strange or row.trials.keys() != set(names):
                raise BadInput(f"a record's rows have its subjects {names}, got {[*row.trials, *strange][:3]}")
        batches = [row.batch for row in self.rows]
        if len(set(batches)) != len(batches):
            raise BadInput(f"a record holds each batch size once, got {batches}")

    @property
    def reference(self) -> SubjectRecord:
        return self.subjects[0]

    @property
    def candidate(self) -> SubjectRecord:
        return self.subjects[1]

    @property
    def is_timed(self) -> bool:
        return any(row.blocks and row.stop != OUT_OF_TIME for row in self.rows)

    def row(self, batch: int) -> Row | None:
        return next((row for row in self.rows if row.batch == batch), None)


def name_of_rerun(reference: str) -> str:
    """Return the name of the reference where it is measured against itself."""
    return f"{reference} again"


def save_bench(bench: Bench, path: Path) -> None:
    write_json(path, {"kind": KIND, "version": VERSION, **asdict(bench)}, indent=1)


def load_bench(path: Path) -> Bench:
    return record_from_file(path, Bench, kind=KIND, version=VERSION, remedy=AGAIN)


def differing_keys(old: Bench, new: Bench) -> dict[str, tuple[Scalar, Scalar]]:
    """Return the must-match keys that differ between two records, with both values; subjects pair by position."""
    pairs: list[tuple[str, Flat, Flat, Iterable[str]]] = [
        ("", old.environment, new.environment, ENVIRONMENT_MUST_MATCH),
        ("", old.settings, new.settings, SETTINGS_MUST_MATCH),
    ]
    for before, after in zip(old.subjects, new.subjects, strict=True):
        keys = sorted({*before.describe, *after.describe} - set(DESCRIBE_MAY_DIFFER))
        pairs.append((f"{after.name}.", before.describe, after.describe, keys))
    return {
        prefix + key: (then.get(key), now.get(key))
        for prefix, then, now, keys in pairs
        for key in keys
        if then.get(key) != now.get(key)
    }
