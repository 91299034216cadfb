"""How seldom does the gate cry wolf? A bound on its false alarms, under loads of many kinds.

A workload of about 5 ms is measured against itself, again and again, each time beside other processes: none to four,
that compute, sweep through memory, or write and read files, all of the time or in turns. Each measurement is judged by
`speedup@b8 < 0.97`, as a release would be. A FAIL is a false alarm; of n comparisons without one, fewer than
1 - 0.05^(1/n) of all give one, at 95 % (Clopper and Pearson 1934, one-sided). Beside it, how often the 95 % interval
of the speed-up holds the true ratio, 1. A run that was interrupted goes on.

    python -m benchmarks.trust.gate_alarms --output benchmarks/results/gate_alarms.json
"""

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from scipy.stats import beta

from benchmarks.trust.gate_noise import CALLS, PLAN, RULE, calibrated, repetition
from ground.files import write_json
from perf.timing.watch import environment

CONFIDENCE = 0.95
MOST_PROCESSES = 4
KEPT = ("verdict", "speedup", "low", "high", "rounds", "disturbed", "share_of_clean_calls", "seconds", "naive_speedup")


def compute() -> None:
    sum(index * index for index in range(20_000))


@cache
def _memory() -> Any:
    """More than caches hold."""
    return np.ones(8_000_000)


def sweep_memory() -> None:
    values = _memory()
    np.add(values, 1.0, out=values)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Processes of these kinds; `busy_s` on average, then as long at rest, None without rest."""

    kinds: tuple[str, ...]
    busy_s: float | None

    @classmethod
    def drawn(cls, rng: random.Random) -> "Load":
        kinds = rng.choices(tuple(KINDS), k=rng.randint(0, MOST_PROCESSES))
        return cls(kinds=tuple(kinds), busy_s=rng.choice([None, 0.05, 0.5, 2.0]))


def keep_busy(kind: str, busy_s: float | None, seed: int) -> None:
    """As long as the parent lives."""
    rng, parent = random.Random(seed), os.getppid()
    while os.getppid() == parent:
        until = perf_counter() + (1.0 if busy_s is None else rng.expovariate(1 / busy_s))
        while perf_counter() < until:
            KINDS[kind]()
        if busy_s is not None:
            time.sleep(rng.expovariate(1 / busy_s))


@contextmanager
def beside(load: Load) -> Iterator[None]:
    running = [
        multiprocessing.Process(target=keep_busy, args=(kind, load.busy_s, seed), daemon=True)
        for seed, kind in enumerate(load.kinds)
    ]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def most_alarms(alarms: int, comparisons: int) -> float:
    """The share of false alarms that is not exceeded, at 95 %."""
    if alarms >= comparisons:
        return 1.0
    return float(beta.ppf(CONFIDENCE, alarms + 1, comparisons - alarms))


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
    by_processes = {
        str(count): tally(own)
        for count in range(MOST_PROCESSES + 1)
        if (own := [one for one in comparisons if len(one["load"]["kinds"]) == count])
    }
    return {
        "kind": "gate-alarms",
        "version": 1,
        "rule": RULE.text,
        "seed": seed,
        "plan": {"calls": CALLS, "time_limit_s": PLAN.time_limit_s, "half_width_rel": PLAN.half_width_rel},
        "environment": environment(),
        "all": tally(comparisons),
        "by_processes": by_processes,
        "comparisons": list(comparisons),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--comparisons", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    done: list[dict[str, Any]] = []
    if arguments.output.is_file():
        done = json.loads(arguments.output.read_text())["comparisons"]
    rng, work = random.Random(arguments.seed), calibrated()
    loads = [Load.drawn(rng) for _ in range(arguments.comparisons)]
    for load in loads[len(done) :]:
        with beside(load):
            found = repetition(work, work)
        about = {"load": asdict(load), "load_average": os.getloadavg()[0]}
        done.append(about | {key: found[key] for key in KEPT})
        write_json(arguments.output, document(done, arguments.seed), indent=1)
        print(len(done), len(load.kinds), found["message"], flush=True)
    print(json.dumps(document(done, arguments.seed)["all"]))


if __name__ == "__main__":
    main()
