"""What is said about a shaky measurement, and nothing about a steady one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from perf.record.runs import BenchTrial, Block, GpuState, Row
from perf.runners.protocol import HostBound, ParallelStreams
from perf.stats.stability import warnings_of

STATE = GpuState(
    sm_clock_mhz=1400, memory_clock_mhz=1500, temperature_c=60, power_w=200.0, throttle=(), foreign_processes=0
)


def row(call_ms: Callable[[int, int], float], *, rounds: int = 20, **every_block: Any) -> Row:
    """Blocks of ten calls; `call_ms(round, call)`."""
    blocks = []
    for index in range(rounds):
        for name in ("dense", "reduced", "reduced", "dense"):
            times = tuple(call_ms(index, call) for call in range(10))
            block = Block(round=index, subject=name, at_s=0.0, calls=10, wall_ms=sum(times), compute_ms=times)
            blocks.append(replace(block, **every_block))
    trials = {name: BenchTrial(status="ok", warm_up_flat=True) for name in ("dense", "reduced")}
    return Row(
        batch=8, trials=trials, calls_per_block=10, settle_calls=1, stop="narrow", blocks=tuple(blocks), noise_blocks=()
    )


def test_a_steady_measurement_is_not_commented() -> None:
    assert warnings_of([row(lambda index, call: 5.0 + 0.01 * ((7 * index + call) % 5))]) == []


@pytest.mark.parametrize(
    ("shaky", "words"),
    [
        (row(lambda index, call: 5.0 if call % 2 else 8.0), "samples vary by 23"),
        (row(lambda index, call: 5.0 + 0.05 * index), "times drifted by +17"),
        (row(lambda index, call: 5.0, gpu=replace(STATE, foreign_processes=2)), "2 other processes used the GPU"),
        (row(lambda index, call: 5.0, gpu=replace(STATE, throttle=("sw_power_cap",))), "lowered the clocks in 80 of"),
        (row(lambda index, call: 5.0, enqueue_ms=49.0), "measure with a CUDA graph"),
        (
            row(lambda index, call: 5.0, lost_ms=(3.0,) * 10),
            "disturbed: other programs took the CPU from 100 % of the calls",
        ),
    ],
)
def test_each_kind_of_shakiness_is_named(shaky: Row, words: str) -> None:
    assert any(words in text for text in warnings_of([shaky])), warnings_of([shaky])


def test_a_device_clock_is_held_to_less_variation_than_the_hosts() -> None:
    varying = row(lambda index, call: 5.0 + 0.4 * (call % 2))  # 4 %
    assert warnings_of([varying]) == []
    on_device = row(lambda index, call: 5.0 + 0.4 * (call % 2), enqueue_ms=1.0)
    assert any("above 2.5 % is unstable" in text for text in warnings_of([on_device]))


def test_dropped_rounds_are_counted_with_the_reason() -> None:
    steady = row(lambda index, call: 5.0)
    hot = replace(steady.blocks[5], dropped="throttled: hw_slowdown")
    spoilt = replace(steady, blocks=(*steady.blocks[:5], hot, *steady.blocks[6:]))
    assert warnings_of([spoilt]) == ["batch 8, 1 of 20 rounds left out: throttled: hw_slowdown"]


def test_a_warm_up_that_was_cut_short_and_a_subject_that_failed_are_told() -> None:
    steady = row(lambda index, call: 5.0)
    trials = {"dense": BenchTrial(status="ok"), "reduced": BenchTrial(status="failed", message="ValueError: no")}
    told = warnings_of([replace(steady, trials=trials)])
    assert "batch 8, dense: the warm-up reached its time limit before the times were flat" in told
    assert "batch 8, reduced: failed: ValueError: no" in told


def test_streams_call_at_once_and_tell_wall_time_only() -> None:
    """Each of two calls waits for the other, so that one after the other would never end."""
    together = threading.Barrier(2, timeout=20)
    bound = HostBound(lambda: together.wait())
    ticks = iter(range(0, 10**9, 1_000_000))
    with ThreadPoolExecutor(2) as pool:
        laps = ParallelStreams((bound, bound), pool).laps(3, lambda: next(ticks))
    assert (laps.calls, laps.compute_ms) == (6, ())
    assert laps.wall_ms > 0
