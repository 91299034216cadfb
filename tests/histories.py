"""Bench records of releases with planted medians, for tests of histories."""

from collections.abc import Sequence

import numpy as np

from perf.record.runs import Bench, BenchTrial, Block, Flat, Row, SubjectRecord

SAME = "a" * 64


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
    """Sixteen rounds ABBA of five calls, which vary by 1 %; `machine` slows both subjects, `lost` is waited in each."""
    rng = np.random.default_rng(day if seed is None else seed)
    trial = BenchTrial(status="ok", warm_up_flat=True)
    rows = tuple(
        Row(
            batch=batch, trials={"dense": trial, "reduced": trial}, calls_per_block=5, settle_calls=1, stop="narrow",
            blocks=tuple(_blocks(rng, machine * batch, {"dense": dense_ms, "reduced": reduced_ms}, lost, spread)),
            noise_blocks=(),
        )
        for batch in batches
    )  # fmt: skip
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
) -> list[Block]:
    blocks = []
    for index in range(16):
        for name in ("dense", "reduced", "reduced", "dense"):
            times = tuple(float(ms) for ms in scale * base_ms[name] * (1 + spread * rng.standard_normal(5)))
            waited = tuple(lost * ms for ms in times)
            blocks.append(
                Block(
                    round=index, subject=name, at_s=float(index), calls=5, wall_ms=sum(times), compute_ms=times,
                    lost_ms=waited,
                )
            )  # fmt: skip
    return blocks
