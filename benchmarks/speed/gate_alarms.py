"""Bound the share of false alarms of the gate, under loads of many kinds.

A workload of about 5 ms is measured against itself, each time beside none to four other processes, which compute, sweep
through memory, or write and read files, all of the time or in turns. Each measurement is judged by
`speedup@b8 < 0.97`; a FAIL is a false alarm. Of n comparisons without one, fewer than 1 - 0.05^(1/n) of all give one,
at 95 % (Clopper and Pearson 1934, one-sided). Beside it: how often the 95 % interval of the speed-up holds the true
ratio, 1, and what the mean of 20 calls of one, then of the other says. A run that was interrupted goes on.

    python -m benchmarks.speed.gate_alarms --output benchmarks/results/gate_alarms.json
"""

import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, perf_counter_ns
from typing import Any

import click
import numpy as np
from scipy.stats import beta

from benchmarks.speed.harness_overhead import work_of
from ground.files import write_json
from perf.gate.evidence import Evidence
from perf.gate.gate import judge
from perf.gate.rule import rule_from_text
from perf.record.runs import Bench, BenchTrial, Row, SubjectRecord, TimedBlock
from perf.runners.protocol import HostBound
from perf.stats.quiet import LOST_REL, is_disturbed
from perf.timing.laps import Plan, warm_up
from perf.timing.rounds import measure_pair
from perf.timing.watch import environment

RULE = rule_from_text("speedup@b8 < 0.97")
CALLS, NAIVE_CALLS, CALL_MS = 5, 20, 5.0
PLAN = Plan(time_limit_s=8.0, half_width_rel=0.008, warm_up_limit_s=1.0)
MOST_PROCESSES = 4
NAMES = ("reference", "candidate")


def compute() -> None:
    sum(index * index for index in range(20_000))


@cache
def _memory() -> Any:
    return np.ones(8_000_000)  # more than caches hold


def sweep_memory() -> None:
    np.add(_memory(), 1.0, out=_memory())


def write_and_read() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4_000_000))
        os.fsync(file.fileno())
        file.seek(0)
        file.read()


KINDS: dict[str, Callable[[], None]] = {
    "compute": compute,
    "sweep memory": sweep_memory,
    "write and read": write_and_read,
}


def drawn_load(rng: random.Random) -> dict[str, Any]:
    """Return kinds of processes, each `busy_s` on average and then as long at rest; None without rest."""
    kinds = rng.choices(tuple(KINDS), k=rng.randint(0, MOST_PROCESSES))
    return {"kinds": kinds, "busy_s": rng.choice([None, 0.05, 0.5, 2.0])}


def keep_busy(kind: str, busy_s: float | None, seed: int) -> None:
    """Do it as long as the parent lives."""
    rng, parent = random.Random(seed), os.getppid()
    while os.getppid() == parent:
        until = perf_counter() + (1.0 if busy_s is None else rng.expovariate(1 / busy_s))
        while perf_counter() < until:
            KINDS[kind]()
        if busy_s is not None:
            time.sleep(rng.expovariate(1 / busy_s))


@contextmanager
def beside(load: dict[str, Any]) -> Iterator[None]:
    running = [
        multiprocessing.Process(target=keep_busy, args=(kind, load["busy_s"], seed), daemon=True)
        for seed, kind in enumerate(load["kinds"])
    ]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def bench_of(blocks: tuple[TimedBlock, ...], stop: str) -> Bench:
    """Return the blocks as the record that a gate judges."""
    trials = dict.fromkeys(NAMES, BenchTrial(status="ok", warm_up_flat=True))
    row = Row(batch=8, trials=trials, calls_per_block=CALLS, settle_calls=1, stop=stop, blocks=blocks, noise_blocks=())
    describe = {"backend": "numpy", "device": "cpu"}
    dense, reduced = (SubjectRecord(name=name, describe=describe) for name in NAMES)
    return Bench(
        created="", command=(), environment={}, settings={}, subjects=(dense, reduced), rows=(row,), warnings=()
    )


def compared(work: Callable[[], object]) -> dict[str, Any]:
    """Return one measurement of a workload against itself, and what gate and naive means make of it."""
    bounds, began = {name: HostBound(work) for name in NAMES}, perf_counter()
    warm = [warm_up(bound, PLAN, perf_counter_ns).samples_ms[-NAIVE_CALLS:] for bound in bounds.values()]
    blocks, stop = measure_pair(bounds, PLAN, calls=CALLS, clock=perf_counter_ns)
    judged = judge([RULE], Evidence(bench=bench_of(blocks, stop))).rules[0]
    clean = [lost <= LOST_REL * ms for b in blocks for lost, ms in zip(b.lost_ms or (), b.compute_ms, strict=True)]
    return {
        "verdict": judged.verdict,
        "speedup": judged.value,
        "low": judged.low,
        "high": judged.high,
        "rounds": len({block.round for block in blocks}),
        "disturbed": is_disturbed(blocks),
        "share_of_clean_calls": round(sum(clean) / len(clean), 3),
        "seconds": round(perf_counter() - began, 2),
        "naive_speedup": round(fmean(warm[0]) / fmean(warm[1]), 4),
    }


def most_alarms(alarms: int, comparisons: int) -> float:
    """Return the share of false alarms that is not exceeded, at 95 %."""
    return 1.0 if alarms >= comparisons else float(beta.ppf(0.95, alarms + 1, comparisons - alarms))


def tally(comparisons: Sequence[dict[str, Any]]) -> dict[str, Any]:
    verdicts = Counter(one["verdict"] for one in comparisons)
    bounded = [one for one in comparisons if one["low"] is not None]
    return {
        "comparisons": len(comparisons),
        **{verdict: verdicts[verdict] for verdict in ("PASS", "FAIL", "INCONCLUSIVE")},
        "false_alarms_below": most_alarms(verdicts["FAIL"], len(comparisons)),
        "intervals": len(bounded),
        "intervals_that_hold_one": sum(one["low"] <= 1.0 <= one["high"] for one in bounded),
        "median_half_width": median((one["high"] - one["low"]) / 2 for one in bounded) if bounded else None,
        "median_seconds": median(one["seconds"] for one in comparisons),
        "naive_alarms": sum(one["naive_speedup"] < 0.97 for one in comparisons),
    }


def document(comparisons: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return the record: all comparisons, and their tallies by the number of processes beside."""
    by_count: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(comparisons, key=lambda one: len(one["load"]["kinds"])):
        by_count.setdefault(str(len(one["load"]["kinds"])), []).append(one)
    return {
        "kind": "gate-alarms",
        "version": 1,
        "rule": RULE.text,
        "seed": seed,
        "plan": {"calls": CALLS, "time_limit_s": PLAN.time_limit_s, "half_width_rel": PLAN.half_width_rel},
        "environment": environment(),
        "all": tally(comparisons),
        "by_processes": {count: tally(own) for count, own in by_count.items()},
        "comparisons": list(comparisons),
    }


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--comparisons", default=320, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(output: Path, comparisons: int, seed: int) -> None:
    done: list[dict[str, Any]] = []
    if output.is_file():
        done = json.loads(output.read_text())["comparisons"]
    rng, work = random.Random(seed), work_of(CALL_MS)
    for load in [drawn_load(rng) for _ in range(comparisons)][len(done) :]:
        with beside(load):
            done.append({"load": load, "load_average": os.getloadavg()[0], **compared(work)})
        write_json(output, document(done, seed), indent=1)
        click.echo(f"{len(done)}, {len(load['kinds'])} processes beside: {done[-1]['verdict']}")


if __name__ == "__main__":
    main()
