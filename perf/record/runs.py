"""The record of one `bench`: raw samples of two subjects, block by block, and the machine they ran on.

Nothing derived is stored: `perf.stats.quiet` says which times statistics keep, `perf.stats.summary` reads them. The
file is one JSON object:

    kind "bench", version 1, created (ISO 8601, UTC), command (list of words, may be empty)
    environment  flat: system, machine, cpu, ..., gpu, driver (null where there is none); see perf.timing.environment
    settings     flat: the plan of the measurement; see perf.timing.laps.Plan
    subjects     two; the first is the reference. name, describe (flat: what the runner really ran on), macs,
                 params, size_bytes, sha256, fused_attention (null when unknown)
    rows         one per batch size, in the order asked for; a row that failed stays
        batch, calls_per_block, settle_calls
        trials        by subject: status ok | oom | failed, message, warm_up_samples_ms, warm_up_flat,
                      peak_memory_bytes, peak_memory_method
        stop          narrow | time limit | round limit | one subject only | nothing to measure
        blocks        in the order run: round, subject, at_s, calls, wall_ms, compute_ms,
                      end_to_end_ms (null: the call's wall time on the CPU is both), enqueue_ms, lost_ms (per
                      call, what its threads waited for a CPU that others had; null where unknown), dropped (null or
                      the reason), gpu (null or its state)
        noise_blocks  the same, of the reference against a second instance of itself
    warnings     sentences

Version history: 1 is the first.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ground.errors import BadInput, NotComparable
from ground.files import object_from_file, require_kind, whole

VERSION = 1
STATUSES = ("ok", "oom", "failed")
Scalar = str | int | float | bool | None
Flat = Mapping[str, Scalar]

# Two latencies mean the same only on the same machine, set up the same way.
ENVIRONMENT_MUST_MATCH = (
    "system", "machine", "cpu", "cpu_count", "cpu_governor",
    "gpu", "gpu_count", "sm", "driver", "cuda", "power_limit_w", "clocks",
)  # fmt: skip
SETTINGS_MUST_MATCH = ("streams", "flush_l2")
DESCRIBE_MAY_DIFFER = ("model",)  # what is compared differs, how it is run may not


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """The GPU between two blocks."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle: tuple[str, ...]
    foreign_processes: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "throttle": tuple(data["throttle"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive calls of one subject; times in milliseconds, `at_s` seconds since the row began."""

    round: int
    subject: str
    at_s: float
    calls: int
    wall_ms: float
    compute_ms: tuple[float, ...]
    end_to_end_ms: tuple[float, ...] | None = None
    enqueue_ms: float | None = None
    lost_ms: tuple[float, ...] | None = None
    dropped: str | None = None
    gpu: GpuState | None = None

    def __post_init__(self) -> None:
        times = (self.wall_ms, *self.compute_ms, *(self.end_to_end_ms or ()))
        if self.calls < 1 or not all(0 < ms < float("inf") for ms in times):
            raise BadInput(f"a block needs calls and positive times; {self.subject}, round {self.round} has {times}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        end_to_end = None if data["end_to_end_ms"] is None else tuple(data["end_to_end_ms"])
        lost = None if data["lost_ms"] is None else tuple(data["lost_ms"])
        gpu = None if data["gpu"] is None else GpuState.from_json(data["gpu"])
        return cls(
            **{
                **data,
                "compute_ms": tuple(data["compute_ms"]),
                "end_to_end_ms": end_to_end,
                "lost_ms": lost,
                "gpu": gpu,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTrial:
    """How one subject fared at one batch size before the comparison: warm-up, memory, or why it could not run."""

    status: str
    message: str | None = None
    warm_up_samples_ms: tuple[float, ...] = ()
    warm_up_flat: bool = False
    peak_memory_bytes: int | None = None
    peak_memory_method: str | None = None

    def __post_init__(self) -> None:
        counts = (self.peak_memory_bytes or 0, *self.warm_up_samples_ms)
        if not all(isinstance(each, int | float) for each in counts) or not isinstance(self.warm_up_flat, bool):
            raise BadInput(f"a trial's samples and memory are numbers, got {str(counts)[:100]}")
        if self.status not in STATUSES:
            raise BadInput(f"a trial's status is one of {', '.join(STATUSES)}, got {self.status!r}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "warm_up_samples_ms": tuple(data["warm_up_samples_ms"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch size."""

    batch: int
    trials: Mapping[str, BenchTrial]
    calls_per_block: int
    settle_calls: int
    stop: str
    blocks: tuple[Block, ...]
    noise_blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        if not all(isinstance(each, int) for each in (self.batch, self.calls_per_block)) or self.batch < 1:
            raise BadInput(f"a row is of a batch of at least 1 image, got {self.batch!r:.100}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        trials = {name: BenchTrial.from_json(trial) for name, trial in data["trials"].items()}
        blocks = tuple(Block.from_json(block) for block in data["blocks"])
        noise = tuple(Block.from_json(block) for block in data["noise_blocks"])
        return cls(**{**data, "trials": trials, "blocks": blocks, "noise_blocks": noise})


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A subject as recorded: its name, what it really ran on and what it costs."""

    name: str
    describe: Flat
    macs: int | None = None
    params: int | None = None
    size_bytes: int | None = None
    sha256: str | None = None
    fused_attention: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The whole record; the first subject is the reference."""

    created: str
    command: tuple[str, ...]
    environment: Flat
    settings: Flat
    subjects: tuple[Described, Described]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]

    def __post_init__(self) -> None:
        names = [subject.name for subject in self.subjects]
        if len(set(names)) != 2:
            raise BadInput(f"a record holds two subjects of different names, got {names}")
        for row in self.rows:
            strange = {block.subject for block in row.blocks} - set(names)
            if strange or row.trials.keys() != set(names):
                raise BadInput(f"a record's rows are of its subjects {names}, got {[*row.trials, *strange][:3]}")
        batches = [row.batch for row in self.rows]
        if len(set(batches)) != len(batches):
            raise BadInput(f"a record holds each batch size once, got {batches}")

    @property
    def reference(self) -> Described:
        return self.subjects[0]

    @property
    def candidate(self) -> Described:
        return self.subjects[1]

    def row(self, batch: int) -> Row | None:
        return next((row for row in self.rows if row.batch == batch), None)


def save_bench(bench: Bench, path: Path) -> None:
    """Write the record as JSON."""
    document = {"kind": "bench", "version": VERSION, **asdict(bench)}
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_bench(path: Path) -> Bench:
    """Read a record; raises BadInput when the file is none."""
    return bench_from_json(object_from_file(path), where=str(path))


def bench_from_json(data: Mapping[str, Any], *, where: str) -> Bench:
    """A record that is already read; `where` names it in the BadInput that is raised when it is none."""
    require_kind(data, kind="bench", version=VERSION, where=where)
    with whole(where, "bench record"):
        _require_flat(data)
        reference, candidate = (Described(**subject) for subject in data["subjects"])
        return Bench(
            created=data["created"],
            command=tuple(data["command"]),
            environment=data["environment"],
            settings=data["settings"],
            subjects=(reference, candidate),
            rows=tuple(Row.from_json(row) for row in data["rows"]),
            warnings=tuple(data["warnings"]),
        )


def _require_flat(data: Mapping[str, Any]) -> None:
    flat = [data["environment"], data["settings"], *(subject["describe"] for subject in data["subjects"])]
    if not all(isinstance(each, dict) and all(map(_is_scalar, each.values())) for each in flat):
        raise TypeError("environment, settings and describe are objects of texts, numbers, booleans and null")
    texts = [data["created"], *data["command"], *data["warnings"], *(subject["name"] for subject in data["subjects"])]
    rows = data["rows"] if isinstance(data["rows"], list) else [{}]
    lists = [part for row in rows for part in (row["blocks"], row["noise_blocks"])]
    if not all(isinstance(each, list) for each in lists):
        raise TypeError("rows and blocks are lists")
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("created, command, warnings and names are texts")


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def differing_keys(old: Bench, new: Bench) -> dict[str, tuple[Scalar, Scalar]]:
    """Must-match keys in which two records differ, with both values; subjects are paired by position."""
    differ = _differences("", old.environment, new.environment, ENVIRONMENT_MUST_MATCH)
    differ |= _differences("", old.settings, new.settings, SETTINGS_MUST_MATCH)
    for before, after in zip(old.subjects, new.subjects, strict=True):
        keys = sorted({*before.describe, *after.describe} - set(DESCRIBE_MAY_DIFFER))
        differ |= _differences(f"{after.name}.", before.describe, after.describe, keys)
    return differ


def require_comparable(old: Bench, new: Bench) -> None:
    """Raise NotComparable, naming each differing key, unless the two records were measured alike."""
    differ = differing_keys(old, new)
    if differ:
        listed = "; ".join(f"{key}: {before!r} then, {after!r} now" for key, (before, after) in differ.items())
        raise NotComparable(f"the two records were not measured alike: {listed}")


def _differences(prefix: str, old: Flat, new: Flat, keys: Iterable[str]) -> dict[str, tuple[Scalar, Scalar]]:
    return {prefix + key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
