"""How often does the gate cry wolf, and how often does it miss?

Forty times a workload of about 5 ms is measured against itself, and forty times against itself with 5 % more work,
while other processes come and go. Each measurement is judged by `speedup@b8 < 0.97`. Beside it, in the same run, a
naive harness: after some calls to warm up the mean of 20 calls of one, then that of 20 calls of the other.

    python benchmarks/trust/gate_noise.py --output benchmarks/results/gate_noise.json
"""

import argparse
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np

from perf.gate.evidence import Evidence
from perf.gate.gate import judge
from perf.gate.rule import rule_from_text
from perf.record.runs import Bench, BenchTrial, Row, SubjectRecord, TimedBlock
from perf.runners.protocol import HostBound
from perf.stats.quiet import LOST_REL, is_disturbed, quiet_spans, samples
from perf.timing.laps import Plan, warm_up
from perf.timing.rounds import measure_pair
from perf.timing.watch import environment

RULE = rule_from_text("speedup@b8 < 0.97")
CALLS = 5
NAIVE_CALLS = 20
CALL_MS = 5.0
SLOWDOWN = 0.05
PLAN = Plan(time_limit_s=8.0, half_width_rel=0.008, warm_up_limit_s=1.0)


@dataclass(frozen=True)
class Work:
    """So many passes over a small array in one thread: time in proportion to the passes, no allocation."""

    passes: int

    def bound(self) -> HostBound:
        values, result = np.linspace(0.1, 1.0, 2048), np.empty(2048)

        def call() -> None:
            for _ in range(self.passes):
                np.sin(values, out=result)

        return HostBound(call)


def calibrated() -> Work:
    """As many passes as take CALL_MS when nothing disturbs: the fastest of many tries tells."""
    trial = Work(100).bound()
    fastest_ms = min(trial.laps(50, perf_counter_ns).compute_ms)
    return Work(round(100 * CALL_MS / fastest_ms))


def come_and_go(seed: int) -> None:
    """Keep a CPU busy for a while, rest for a while, both about 1.5 s on average, as long as the parent lives."""
    rng, parent = random.Random(seed), os.getppid()
    while os.getppid() == parent:
        until = perf_counter() + rng.expovariate(1 / 1.5)
        while perf_counter() < until:
            pass
        time.sleep(rng.expovariate(1 / 1.5))


@contextmanager
def background(processes: int) -> Iterator[None]:
    running = [multiprocessing.Process(target=come_and_go, args=(seed,), daemon=True) for seed in range(processes)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.terminate()
            process.join()


def record_of(blocks: tuple[TimedBlock, ...], stop: str) -> Bench:
    """The blocks as the record that a gate judges."""
    trial = BenchTrial(status="ok", warm_up_flat=True)
    row = Row(
        batch=8,
        trials={"reference": trial, "candidate": trial},
        calls_per_block=CALLS,
        settle_calls=1,
        stop=stop,
        blocks=blocks,
        noise_blocks=(),
    )
    describe = {"backend": "numpy", "device": "cpu"}
    subjects = (SubjectRecord(name="reference", describe=describe), SubjectRecord(name="candidate", describe=describe))
    return Bench(created="", command=(), environment={}, settings={}, subjects=subjects, rows=(row,), warnings=())


def repetition(reference: Work, candidate: Work) -> dict[str, Any]:
    """One measurement and what both harnesses make of it."""
    bounds = {"reference": reference.bound(), "candidate": candidate.bound()}
    began = perf_counter()
    warm = [warm_up(bound, PLAN, perf_counter_ns).samples_ms[-NAIVE_CALLS:] for bound in bounds.values()]
    blocks, stop = measure_pair(bounds, PLAN, calls=CALLS, clock=perf_counter_ns)
    judged = judge([RULE], Evidence(bench=record_of(blocks, stop))).rules[0]
    clean = [lost <= LOST_REL * ms for b in blocks for lost, ms in zip(b.lost_ms or (), b.compute_ms, strict=True)]
    return {
        "verdict": judged.verdict,
        "speedup": judged.value,
        "low": judged.low,
        "high": judged.high,
        "message": judged.message,
        "rounds": len({block.round for block in blocks}),
        "quiet_spans": len(quiet_spans(blocks)),
        "disturbed": is_disturbed(blocks),
        "share_of_clean_calls": round(sum(clean) / len(clean), 3),
        "stop": stop,
        "seconds": round(perf_counter() - began, 2),
        "reference_p50_ms": round(float(np.median(np.concatenate(samples(blocks, "reference")))), 3),
        "naive_speedup": round(fmean(warm[0]) / fmean(warm[1]), 4),
    }


def tally(repetitions: list[dict[str, Any]]) -> dict[str, Any]:
    """Verdicts, and how often the naive harness would have said that the bound is broken."""
    widths = [(one["high"] - one["low"]) / 2 for one in repetitions if one["high"] is not None]
    return {
        "repetitions": len(repetitions),
        **{
            verdict: sum(one["verdict"] == verdict for one in repetitions)
            for verdict in ("PASS", "FAIL", "INCONCLUSIVE")
        },
        "naive_fail": sum(one["naive_speedup"] < 0.97 for one in repetitions),
        "naive_sees_at_least_3_percent_speedup": sum(one["naive_speedup"] > 1.03 for one in repetitions),
        "median_half_width": round(median(widths), 4) if widths else None,
        "median_seconds": median(one["seconds"] for one in repetitions),
        "median_share_of_clean_calls": median(one["share_of_clean_calls"] for one in repetitions),
        "disturbed": sum(one["disturbed"] for one in repetitions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--background", type=int, default=2, help="processes that come and go (default: 2)")
    arguments = parser.parse_args()
    work = calibrated()
    slower = Work(round(work.passes * (1 + SLOWDOWN)))
    same: list[dict[str, Any]] = []
    slowed: list[dict[str, Any]] = []
    loads: list[float] = []
    with background(arguments.background):
        for index in range(arguments.repetitions):
            same.append(repetition(work, work))
            slowed.append(repetition(work, slower))
            loads.append(os.getloadavg()[0])
            print(index, same[-1]["message"], "|", slowed[-1]["message"], flush=True)
    document = {
        "kind": "gate-noise",
        "version": 1,
        "rule": RULE.text,
        "slowdown": slower.passes / work.passes - 1,
        "background_processes": arguments.background,
        "plan": {
            "calls": CALLS,
            "min_rounds": PLAN.min_rounds,
            "time_limit_s": PLAN.time_limit_s,
            "half_width_rel": PLAN.half_width_rel,
        },
        "environment": environment(),
        "load_average": {"least": min(loads), "median": median(loads), "most": max(loads)},
        "against_itself": tally(same),
        "five_percent_slower": tally(slowed),
        "repetitions": {"against_itself": same, "five_percent_slower": slowed},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name in ("against_itself", "five_percent_slower"):
        print(name, document[name])


if __name__ == "__main__":
    main()
