"""Bench records with planted times, and those of releases with planted medians, for tests of histories."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from perf.record.runs import Bench, BenchTrial, Flat, Row, SubjectRecord, TimedBlock

SAME = "a" * 64


def block(
    index: int, subject: str, times: Iterable[float], *, lost_rel: float | None = None, **more: Any
) -> TimedBlock:
    """Make a block of one subject in one round, whose calls wait for a CPU for this share of their time."""
    compute_ms = tuple(map(float, times))
    lost_ms = None if lost_rel is None else tuple(lost_rel * ms for ms in compute_ms)
    measured: dict[str, Any] = {"calls": len(compute_ms), "wall_ms": sum(compute_ms), "compute_ms": compute_ms}
    return TimedBlock(round=index, subject=subject, at_s=0.0, **measured | {"lost_ms": lost_ms} | more)


def row(batch: int, blocks: Iterable[TimedBlock], **more: Any) -> Row:
    """Make the row of a dense and a reduced model that both ran."""
    trials = dict.fromkeys(("dense", "reduced"), BenchTrial(status="ok", warm_up_flat=True))
    given: dict[str, Any] = {"trials": trials, "calls_per_block": 5, "settle_calls": 1, "stop": "narrow"}
    return Row(batch=batch, blocks=tuple(blocks), **given | {"noise_blocks": ()} | more)


def bench_of_release(
    day: int,
    reduced_ms: float,
    *,
    dense_ms: float = 5.0,
    machine: float = 1.0,
    sha256: str | None = SAME,
    environment: Flat | None = None,
    batches: Sequence[int] = (1,),
    lost: float = 0.0,
    spread: float = 0.01,
    seed: int | None = None,
) -> Bench:
    """Make a record of sixteen ABBA rounds of five calls, which vary by `spread`.

    `machine` multiplies the times of both subjects, and `lost` is the share of a call that waits for a CPU.
    """
    rng = np.random.default_rng(day if seed is None else seed)
    base_ms = {"dense": dense_ms, "reduced": reduced_ms}
    rows = tuple(row(batch, _blocks(rng, machine * batch, base_ms, lost, spread)) for batch in batches)
    describe = {"backend": "onnxruntime", "device": "cpu"}
    return Bench(
        created=f"2026-03-{day + 1:02d}T10:00:00+00:00",
        command=(),
        environment=environment or {"cpu": "one"},
        settings={},
        subjects=(
            SubjectRecord(name="dense", describe=describe, sha256=sha256),
            SubjectRecord(name="reduced", describe=describe),
        ),
        rows=rows,
        warnings=(),
    )


def _blocks(
    rng: np.random.Generator, scale: float, base_ms: dict[str, float], lost: float, spread: float
) -> Iterator[TimedBlock]:
    for index in range(16):
        for name in ("dense", "reduced", "reduced", "dense"):
            times = scale * base_ms[name] * (1 + spread * rng.standard_normal(5))
            yield block(index, name, times, lost_rel=lost)
