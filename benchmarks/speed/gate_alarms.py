"""Measure how often the interval of a speed-up holds the true ratio, and how often the gate raises a false alarm.

A workload of about 1 ms is measured against itself, in three designs: `quiet` without other programs of this script,
`starts or stops` beside one to three processes that start or stop at a random time, and `turns` beside none to four.
These compute, sweep through memory, or write and read files; in `turns` all of the time or in turns. Each comparison
fills its time limit, and the record keeps the ratio of every span of rounds, so that intervals and stop rules can be
tried on the same measurements. The tallies replay the rule that ends a measurement and judge by `speedup@b8 < 1`, where
a FAIL is a false alarm. They also replay the bootstrap over rounds alone, with its own rule. A run that was interrupted
goes on.

    python -m benchmarks.speed.gate_alarms --design quiet --output benchmarks/results/gate_alarms.json
"""

import json
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, perf_counter_ns
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from benchmarks.speed.harness_overhead import work_of
from ground.files import write_json
from perf.gate.evidence import Evidence
from perf.gate.gate import Verdict, judge
from perf.gate.rule import rule_from_text
from perf.record.runs import Bench, BenchTrial, Row, SubjectRecord, TimedBlock
from perf.runners.protocol import HostBound
from perf.stats.quiet import interrupted_share, is_disturbed, samples
from perf.stats.stats import DEFAULT_CONFIDENCE, MIN_ROUNDS, Interval, bootstrap_ends, ratio_of_medians
from perf.timing.laps import Plan, warm_up
from perf.timing.rounds import is_test_due, measure_rounds
from perf.timing.watch import environment

RULE = rule_from_text("speedup@b8 < 1")
CALLS, NAIVE_CALLS, CALL_MS = 5, 20, 1.0
PLAN = Plan(time_limit_s=3.0, warm_up_limit_s=0.5)
LIMITS_S = {"quiet": 3.0, "starts or stops": 3.0, "turns": 6.0}
UNIT = 1e-5  # of the recorded deviations of ratios from 1
MOST_PROCESSES = 4
NAIVE_APART = 0.03
NAMES = ("reference", "candidate")
Floats = NDArray[np.float64]
CHANGES: Mapping[str, Callable[[Floats], Floats]] = {
    "equal": lambda ratio_R: ratio_R,
    "swapped": lambda ratio_R: 1 / ratio_R,
    "slower by 5 %": lambda ratio_R: ratio_R / 1.05,
}


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


def turns(rng: random.Random) -> dict[str, Any]:
    """Return kinds of processes, each `busy_s` on average and then as long at rest; None without rest."""
    kinds = rng.choices(tuple(KINDS), k=rng.randint(0, MOST_PROCESSES))
    return {"kinds": kinds, "busy_s": rng.choice([None, 0.05, 0.5, 2.0])}


def starts_or_stops(rng: random.Random) -> dict[str, Any]:
    """Return kinds of processes that all start, or all stop, after `at_s`."""
    kinds = rng.choices(tuple(KINDS), k=rng.randint(1, 3))
    return {
        "kinds": kinds,
        "starts": rng.random() < 0.5,
        "at_s": round(rng.uniform(0.3, LIMITS_S["starts or stops"]), 2),
    }


DESIGNS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "quiet": lambda rng: {"kinds": []},
    "turns": turns,
    "starts or stops": starts_or_stops,
}


def keep_busy(kind: str, load: dict[str, Any], seed: int) -> None:
    """Do it as the load says, as long as the parent lives."""
    rng, parent, began, busy_s = random.Random(seed), os.getppid(), perf_counter(), load.get("busy_s")
    if load.get("starts"):
        time.sleep(load["at_s"])
    stops_s = load["at_s"] if load.get("starts") is False else float("inf")
    while os.getppid() == parent and perf_counter() < began + stops_s:
        until = min(perf_counter() + (0.1 if busy_s is None else rng.expovariate(1 / busy_s)), began + stops_s)
        while perf_counter() < until:
            KINDS[kind]()
        if busy_s is not None:
            time.sleep(rng.expovariate(1 / busy_s))


@contextmanager
def beside(load: dict[str, Any]) -> Iterator[None]:
    running = [
        multiprocessing.Process(target=keep_busy, args=(kind, load, seed), daemon=True)
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


def compared(work: Callable[[], object], limit_s: float) -> dict[str, Any]:
    """Return one measurement of a workload against itself, as long as the time limit."""
    bounds, began = {name: HostBound(work) for name in NAMES}, perf_counter()
    warm = [warm_up(bound, PLAN, perf_counter_ns).samples_ms[-NAIVE_CALLS:] for bound in bounds.values()]
    left_s = limit_s - (perf_counter() - began)
    blocks = measure_rounds(bounds, PLAN.max_rounds, limit_s=left_s, calls=CALLS, clock=perf_counter_ns)
    slow, fast = (samples(blocks, name) for name in NAMES)
    ratio_R = [np.median(above) / np.median(below) for above, below in zip(slow, fast, strict=True)]
    return {
        "disturbed": is_disturbed(blocks),
        "clean": round(1 - interrupted_share(blocks), 3),
        "rounds": len({block.round for block in blocks}),
        "naive_speedup": round(fmean(warm[0]) / fmean(warm[1]), 4),
        "ratios": " ".join(str(round((ratio - 1) / UNIT)) for ratio in ratio_R),
    }


def bench_of(ratio_R: Floats, *, disturbed: bool) -> Bench:
    """Return a record with these ratios of its rounds, two equal calls each, for a gate to judge."""
    blocks = tuple(
        TimedBlock(round=index, subject=name, at_s=0.0, calls=2, wall_ms=2 * ms, compute_ms=(ms, ms),
                   lost_ms=(ms * disturbed,) * 2)
        for index, ratio in enumerate(ratio_R.tolist())
        for name, ms in zip(NAMES, (ratio, 1.0), strict=True)
    )  # fmt: skip
    trials = dict.fromkeys(NAMES, BenchTrial(status="ok", warm_up_flat=True))
    row = Row(batch=8, trials=trials, calls_per_block=2, settle_calls=0, stop="", blocks=blocks, noise_blocks=())
    describe = {"backend": "numpy", "device": "cpu"}
    dense, reduced = (SubjectRecord(name=name, describe=describe) for name in NAMES)
    return Bench(
        created="", command=(), environment={}, settings={}, subjects=(dense, reduced), rows=(row,), warnings=()
    )


def interval_of(ratio_R: Floats) -> Interval:
    return ratio_of_medians([*ratio_R[:, None]], [np.ones(1)] * len(ratio_R))


def bootstrap_of(ratio_R: Floats) -> Interval:
    """Return the interval by the bootstrap over rounds alone."""
    value = float(np.median(ratio_R))
    if len(ratio_R) < MIN_ROUNDS:
        return Interval(value=value, low=0.0, high=math.inf)
    low, high = bootstrap_ends(lambda drawn_DR: np.median(ratio_R[drawn_DR], axis=1), len(ratio_R), DEFAULT_CONFIDENCE)
    return Interval(value=value, low=min(low, value), high=max(high, value))


def is_due_by_eighths(rounds: int, least: int) -> bool:
    """Return whether the interval was tested at this number of rounds when the bootstrap alone ended measurements."""
    return rounds >= least and rounds % max(rounds // 8, 1) == 0


def measured_until(
    ratio_R: Floats, interval: Callable[[Floats], Interval], is_due: Callable[[int, int], bool]
) -> Floats:
    """Return the ratios up to the end of a measurement that this interval ends."""
    for rounds in range(PLAN.min_rounds, len(ratio_R)):
        if is_due(rounds, PLAN.min_rounds) and interval(ratio_R[:rounds]).half_width_rel <= PLAN.half_width_rel:
            return ratio_R[:rounds]
    return ratio_R


def verdict_of(ratio_R: Floats, *, disturbed: bool) -> Verdict:
    return judge([RULE], Evidence(bench=bench_of(ratio_R, disturbed=disturbed))).rules[0].verdict


def most_alarms(alarms: int, comparisons: int) -> float:
    """Return the share of false alarms that is not exceeded, at 95 %."""
    return 1.0 if alarms >= comparisons else float(beta.ppf(0.95, alarms + 1, comparisons - alarms))


def tally(comparisons: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count intervals that hold 1, and verdicts of the rule: on each comparison, with its copies swapped, and slower.

    `width_to_bootstrap` compares widths over all rounds; other figures are those at the end of the measurement.
    """
    every = [1 + UNIT * np.array(one["ratios"].split(), dtype=np.float64) for one in comparisons]
    ended = [measured_until(ratio_R, interval_of, is_test_due) for ratio_R in every]
    found = [interval for ratio_R in ended if (interval := interval_of(ratio_R)).is_bounded]
    older = [bootstrap_of(measured_until(ratio_R, bootstrap_of, is_due_by_eighths)) for ratio_R in every]
    bounded = [ratio_R for ratio_R in every if len(ratio_R) >= MIN_ROUNDS]
    verdicts = {
        name: Counter(
            verdict_of(change(ratio_R), disturbed=one["disturbed"])
            for one, ratio_R in zip(comparisons, ended, strict=True)
        )
        for name, change in CHANGES.items()
    }
    return {
        "comparisons": len(comparisons),
        "intervals": len(found),
        "hold_one": sum(map(holds_one, found)),
        "bootstrap_hold_one": sum(map(holds_one, (interval for interval in older if interval.is_bounded))),
        "width_to_bootstrap": median(
            interval_of(ratio_R).half_width_rel / bootstrap_of(ratio_R).half_width_rel for ratio_R in bounded
        ),
        "median_half_width": median(interval.half_width_rel for interval in found),
        "median_rounds": median(map(len, ended)),
        "median_load_average": median(one["load_average"] for one in comparisons),
        "verdicts": {name: dict(counts) for name, counts in verdicts.items()},
        "naive_apart": sum(abs(one["naive_speedup"] - 1) > NAIVE_APART for one in comparisons),
    }


def total(tallies: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """Bound the share of false alarms in all designs together."""
    comparisons = sum(each["comparisons"] for each in tallies)
    alarms = sum(each["verdicts"]["equal"].get("FAIL", 0) for each in tallies)
    return {
        "comparisons": comparisons,
        "false_alarms": alarms,
        "false_alarms_below": most_alarms(alarms, comparisons),
    }


def holds_one(interval: Interval) -> bool:
    return interval.low <= 1.0 <= interval.high


def document(designs: Mapping[str, Sequence[dict[str, Any]]], seed: int) -> dict[str, Any]:
    return {
        "kind": "gate-alarms",
        "version": 2,
        "rule": RULE.text,
        "seed": seed,
        "plan": {"calls": CALLS, "limits_s": LIMITS_S, "half_width_rel": PLAN.half_width_rel},
        "environment": environment(),
        "designs": {name: list(comparisons) for name, comparisons in designs.items()},
    }


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--design", type=click.Choice([*DESIGNS]), multiple=True, help="Designs to measure; without it all.")
@click.option("--comparisons", default=400, show_default=True, help="Of each design; 0 only tallies those of the file.")
@click.option("--seed", default=0, show_default=True)
def main(output: Path, design: tuple[str, ...], comparisons: int, seed: int) -> None:
    done: dict[str, list[dict[str, Any]]] = {}
    if output.is_file():
        done = json.loads(output.read_text())["designs"]
    work = work_of(CALL_MS)
    for name in design or DESIGNS:
        rng, own = random.Random(seed), done.setdefault(name, [])
        for load in [DESIGNS[name](rng) for _ in range(comparisons)][len(own) :]:
            with beside(load):
                measured = compared(work, LIMITS_S[name])
            own.append({"load": load, "load_average": os.getloadavg()[0], **measured})
            write_json(output, document(done, seed), indent=1)
            click.echo(f"{name}: {len(own)} of {comparisons}")
    tallies = {name: tally(own) for name, own in done.items() if own}
    write_json(output, document(done, seed) | {"all": total(tallies.values()), "tallies": tallies}, indent=1)


if __name__ == "__main__":
    main()
