"""The overhead of the timing code on a call of 5 ms at batch 1.

`inside_us` is the time that a sample contains beyond the call, measured on an empty function. `around_us` is the CPU
time of the timing code for a call, inside the sample or around it, measured on blocks with as many empty calls as a
block of 5 ms calls has. `against_bare_loop_share` checks this on real calls: blocks of the timing code against the same
calls in a bare loop, in turns, in CPU time. Other programs raise this last figure, since the timing code asks for the
length of every interruption and finds cold caches after it; `load_average` shows how busy the machine was.

    python -m benchmarks.speed.harness_overhead --output benchmarks/results/harness_overhead.json
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time_ns

import click
import numpy as np

from ground.files import write_json
from perf.runners.protocol import HostBound
from perf.stats.quiet import samples
from perf.stats.stats import ratio_of_medians
from perf.timing.laps import Bound, Clock, Laps
from perf.timing.rounds import measure_rounds
from perf.timing.watch import environment

CALL_MS = 5.0
CALLS = 5
ROUNDS = 120
EMPTY_BLOCKS = 4000


@dataclass(frozen=True)
class BareLoop:
    """Calls of a function without any timing code between them."""

    call: Callable[[], object]

    def laps(self, calls: int, clock: Clock) -> Laps:
        call, started = self.call, clock()
        for _ in range(calls):
            call()
        return Laps(calls=calls, wall_ms=(clock() - started) / 1e6, compute_ms=())


@dataclass(frozen=True)
class Whole:
    """A block of the timing code, timed as one piece."""

    bound: HostBound

    def laps(self, calls: int, clock: Clock) -> Laps:
        started = clock()
        self.bound.laps(calls, clock)
        return Laps(calls=calls, wall_ms=(clock() - started) / 1e6, compute_ms=())


def work_of(milliseconds: float) -> Callable[[], object]:
    """Return a single-threaded function that takes about this time and allocates no memory."""
    values, result = np.linspace(0.1, 1.0, 2048), np.empty(2048)

    def passes(count: int) -> Callable[[], None]:
        def call() -> None:
            for _ in range(count):
                np.sin(values, out=result)

        return call

    fastest_ms = min(HostBound(passes(100)).laps(50, perf_counter_ns).compute_ms)
    return passes(round(100 * milliseconds / fastest_ms))


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(output: Path) -> None:
    empty = HostBound(lambda: None)
    inside_us = 1e3 * median(empty.laps(100_000, perf_counter_ns).compute_ms)
    started = process_time_ns()
    for _ in range(EMPTY_BLOCKS):
        empty.laps(CALLS, perf_counter_ns)
    around_us = (process_time_ns() - started) / 1e3 / EMPTY_BLOCKS / CALLS
    call = work_of(CALL_MS)
    bounds: dict[str, Bound] = {"harness": Whole(HostBound(call)), "bare": BareLoop(call)}
    blocks = measure_rounds(bounds, ROUNDS, calls=CALLS, clock=process_time_ns)
    harness, bare = samples(blocks, "harness", "wall"), samples(blocks, "bare", "wall")
    ratio = ratio_of_medians(harness, bare)
    call_ms = float(np.median(np.concatenate(bare)))
    document = {
        "kind": "harness-overhead",
        "version": 1,
        "environment": environment(),
        "call_ms": round(call_ms, 3),
        "inside_us": round(inside_us, 3),
        "inside_share": round(inside_us / 1e3 / call_ms, 6),
        "around_us": round(around_us, 2),
        "around_share": round(around_us / 1e3 / call_ms, 5),
        "against_bare_loop_share": [round(end - 1, 5) for end in (ratio.low, ratio.value, ratio.high)],
        "rounds": ROUNDS,
        "calls_per_block": CALLS,
    }
    write_json(output, document, indent=1)
    click.echo(json.dumps({key: value for key, value in document.items() if key != "environment"}, indent=1))


if __name__ == "__main__":
    main()
