"""Warm-up, rounds and quiet spans on a fake clock with replayed traces of drift, spikes, modes and throttling."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from perf.record.runs import TimedBlock
from perf.record.states import CpuState, GpuState, MachineState
from perf.stats.quiet import (
    interrupted_share,
    is_disturbed,
    quiet_spans,
    samples,
    throttle_reasons,
    whole_rounds,
)
from perf.stats.stability import drift
from perf.stats.summary import speedup
from perf.timing.laps import Clock, Laps, Plan, warm_up
from perf.timing.rounds import calls_per_block, measure_pair, measure_rounds, settle_calls
from perf.timing.watch import has_vnni, lost_time
from tests.doubles import FakeClock, some
from tests.histories import block
from tests.refusals import rejects

PLAN = Plan(min_rounds=6, max_rounds=60, time_limit_s=5.0, noise_rounds=6)


@dataclass
class Calls:
    """A subject whose calls take `call_ms(now_ms)` and wait `waits_ms(now_ms)` more for a CPU."""

    clock: FakeClock
    call_ms: Callable[[float], float]
    waits_ms: Callable[[float], float] | None = None
    log: list[str] = field(default_factory=list)
    name: str = ""

    def laps(self, calls: int, clock: Clock) -> Laps:
        self.log.append(f"{self.name}{calls}")
        times, lost = [], []
        for _ in range(calls):
            now_ms = self.clock.now_ns / 1e6
            lost.append(self.waits_ms(now_ms) if self.waits_ms else 0.0)
            times.append(self.call_ms(now_ms) + lost[-1])
            self.clock.pass_ms(times[-1])
        lost_ms = tuple(lost) if self.waits_ms else None
        return Laps(calls=calls, wall_ms=sum(times), compute_ms=tuple(times), lost_ms=lost_ms)


def replay(clock: FakeClock, trace: Iterator[float], **more: Any) -> Calls:
    """Make a subject whose calls take the times of a trace."""
    return Calls(clock, lambda _: next(trace), **more)


def steady(clock: FakeClock, ms: float) -> Calls:
    return replay(clock, cycle([ms]))


def test_warm_up_ends_when_a_falling_trace_turns_flat() -> None:
    clock = FakeClock()
    falling = [20.0 - 0.25 * index for index in range(40)]
    warmed = warm_up(replay(clock, iter(falling + [10.0] * 100)), PLAN, clock)
    assert warmed.flat
    assert 45 <= len(warmed.samples_ms) <= 62
    assert warmed.samples_ms[:40] == tuple(falling)


def test_warm_up_needs_its_least_time_and_calls() -> None:
    clock = FakeClock()
    warmed = warm_up(steady(clock, 1.0), PLAN, clock)
    assert len(warmed.samples_ms) == 200  # 0.2 s of 1 ms
    assert len(warm_up(steady(clock, 100.0), PLAN, clock).samples_ms) == PLAN.warm_up_window


@pytest.mark.parametrize("times", [[10.0, 10.1, 9.9, 10.0, 80.0, 10.0, 9.9], [10.0, 16.0, 16.1, 10.1, 9.9, 15.9]])
def test_spikes_or_two_modes_do_not_prolong_the_warm_up(times: list[float]) -> None:
    clock = FakeClock()
    assert warm_up(replay(clock, cycle(times)), PLAN, clock).flat


def test_warm_up_that_never_turns_flat_ends_at_its_limit() -> None:
    clock = FakeClock()
    endless = (100.0 * 0.99**index for index in count())
    plan = Plan(warm_up_limit_s=3.0)
    assert not warm_up(replay(clock, endless), plan, clock).flat
    assert clock.now_ns / 1e9 == pytest.approx(3.0, abs=0.2)


def test_repeated_warm_up_continues_from_earlier_calls() -> None:
    clock = FakeClock()
    begun = warm_up(steady(clock, 100.0), PLAN, clock, limit_s=0.0)
    assert (len(begun.samples_ms), begun.flat) == (1, False)  # one call at least
    warmed = warm_up(steady(clock, 100.0), PLAN, clock, begun=begun.samples_ms, limit_s=0.55)
    assert (len(warmed.samples_ms), warmed.flat) == (1 + 5, False)
    assert clock.now_ns / 1e9 == pytest.approx(0.6)
    assert len(warm_up(steady(clock, 100.0), PLAN, clock, begun=begun.samples_ms).samples_ms) == PLAN.warm_up_window


def test_rounds_are_abba_then_baab_with_a_settling_call_each() -> None:
    clock, log = FakeClock(), list[str]()
    bounds = {name: replay(clock, cycle([10.0]), log=log, name=name) for name in ("a", "b")}
    blocks = measure_rounds(bounds, 2, calls=5, clock=clock)
    assert [block.subject for block in blocks] == list("abba" + "baab")
    assert log == [word for name in "abba" + "baab" for word in (f"{name}1", f"{name}5")]


def test_long_calls_skip_the_settling_call() -> None:
    assert [settle_calls(calls) for calls in (1, 3, 4, 20)] == [0, 0, 1, 1]


@pytest.mark.parametrize(("call_ms", "calls"), [(5.0, 10), (0.01, 200), (60.0, 1), (24.0, 3)])
def test_block_lasts_about_its_target_time(call_ms: float, calls: int) -> None:
    assert calls_per_block(call_ms, 50.0) == calls


def test_steady_machine_stops_at_the_minimum() -> None:
    clock = FakeClock()
    bounds = {"dense": steady(clock, 6.0), "reduced": steady(clock, 4.0)}
    blocks, stop = measure_pair(bounds, PLAN, calls=5, clock=clock)
    assert (stop, len(blocks)) == ("narrow", 4 * PLAN.min_rounds)
    ratio = some(speedup(blocks, "dense", "reduced"))
    assert (ratio.value, ratio.low, ratio.high) == (1.5, 1.5, 1.5)


def test_noisy_machine_runs_to_the_time_or_round_limit() -> None:
    clock = FakeClock()
    bounds = {"a": replay(clock, cycle([5.0, 9.0, 5.5, 7.0, 6.0])), "b": replay(clock, cycle([6.0, 5.0, 8.0]))}
    plan = Plan(min_rounds=6, time_limit_s=2.0, half_width_rel=1e-6)
    blocks, stop = measure_pair(bounds, plan, calls=1, clock=clock)
    assert stop == "time limit"
    assert 1.95 <= clock.now_ns / 1e9 <= 2.0
    assert len(blocks) > 4 * plan.min_rounds
    blocks, stop = measure_pair(bounds, replace(plan, max_rounds=9), calls=1, clock=clock)
    assert (stop, len(blocks)) == ("round limit", 4 * 9)


def test_no_round_starts_that_would_exceed_the_limit() -> None:
    clock = FakeClock()
    bounds = {"a": steady(clock, 1000.0), "b": steady(clock, 900.0)}
    blocks, stop = measure_pair(bounds, Plan(time_limit_s=15.0), calls=1, clock=clock)
    assert (stop, len(blocks)) == ("time limit", 4 * 3)
    assert clock.now_ns / 1e9 == pytest.approx(3 * 3.8)
    assert len(measure_rounds(bounds, 8, calls=1, clock=clock, limit_s=10.0)) == 4 * 2


def test_round_cut_by_the_limit_is_kept_but_not_compared() -> None:
    clock = FakeClock()
    slower = iter([1000.0] * 4 + [7000.0] * 9)
    bounds = {"a": replay(clock, slower), "b": steady(clock, 1000.0)}
    blocks, stop = measure_pair(bounds, Plan(time_limit_s=12.0), calls=1, clock=clock)
    assert (stop, clock.now_ns / 1e9) == ("time limit", 15.0)  # the call under way at 12 s ends at 15
    assert [block.dropped for block in blocks] == [None] * 8 + ["the time limit came within the round"]
    assert whole_rounds(blocks) == [0, 1]
    assert [len(times) for times in samples(blocks, "a")] == [2, 2]


def test_steady_slowdown_does_not_bias_the_ratio() -> None:
    """Calls slow down steadily from 5 to 7.4 ms; a subject measured after the other would look slower."""
    clock = FakeClock()

    def slowing(base_ms: float) -> Callable[[float], float]:
        return lambda now_ms: base_ms * (1 + 0.6 * now_ms / 8000)

    bounds = {"dense": Calls(clock, slowing(5.0)), "same": Calls(clock, slowing(5.0))}
    blocks = measure_rounds(bounds, 40, calls=5, clock=clock)
    assert some(speedup(blocks, "dense", "same")).value == pytest.approx(1.0, abs=0.002)
    assert drift(blocks, "dense") == pytest.approx(0.36, abs=0.05)


GPU = GpuState(
    sm_clock_mhz=1000, memory_clock_mhz=1000, temperature_c=90, power_w=300.0, throttle=("sw_power_cap",),
    foreign_processes=0,
)  # fmt: skip
CPU = CpuState(governor="powersave", clock_mhz=800, temperature_c=97, quota_cpus=1.5, paused_ms=9.0, throttle=())


def hot_at(*readings: int, on_cpu: bool = False) -> Callable[[], MachineState]:
    """Make a watch that tells of throttling at these readings, of which each block has two."""
    asked = count()

    def watch() -> MachineState:
        hot = next(asked) in readings
        if on_cpu:
            return MachineState(cpu=replace(CPU, throttle=("cgroup_quota",)) if hot else CPU)
        return MachineState(gpu=replace(GPU, throttle=("hw_thermal_slowdown",)) if hot else GPU)

    return watch


@pytest.mark.parametrize(("reading", "on_cpu"), [(10, False), (11, False), (11, True)])
def test_round_with_a_block_throttled_at_its_start_or_end_does_not_count(reading: int, on_cpu: bool) -> None:
    clock = FakeClock()
    bounds = {"a": steady(clock, 10.0), "b": steady(clock, 10.0)}
    watch = hot_at(reading, on_cpu=on_cpu)  # around the second block of the second round
    blocks = measure_rounds(bounds, 7, calls=5, clock=clock, watch=watch)
    assert [bool(block.throttled) for block in blocks].index(True) == 5
    assert sum(bool(block.throttled) for block in blocks) == 1
    assert whole_rounds(blocks) == [0, 2, 3, 4, 5, 6]
    assert throttle_reasons(blocks) == ()
    assert [len(times) for times in samples(blocks, "a")] == [10] * 6


@pytest.mark.parametrize("on_cpu", [False, True])
def test_row_throttled_in_almost_all_rounds_is_kept_and_marked(on_cpu: bool) -> None:
    """Two rounds of seven are without throttling, too few for an interval."""
    clock = FakeClock()
    bounds = {"a": steady(clock, 10.0), "b": steady(clock, 10.0)}
    blocks = measure_rounds(bounds, 7, calls=5, clock=clock, watch=hot_at(*range(16, 99), on_cpu=on_cpu))
    assert throttle_reasons(blocks) == ("cgroup_quota" if on_cpu else "hw_thermal_slowdown",)
    assert whole_rounds(blocks) == [*range(7)]
    assert len(samples(blocks, "a")) == 7


def test_throttled_machine_is_measured_to_the_limit() -> None:
    clock = FakeClock()
    bounds = {"a": steady(clock, 10.0), "b": steady(clock, 10.0)}
    blocks, stop = measure_pair(bounds, Plan(time_limit_s=3.0), calls=5, clock=clock, watch=hot_at(*range(9999)))
    assert stop == "time limit"
    assert throttle_reasons(blocks) == ("hw_thermal_slowdown",)


def interrupted(clock: FakeClock, busy: Callable[[float], bool]) -> Calls:
    """Make a subject of 10 ms a call whose calls wait another 15 ms for a CPU while `busy(now_ms)`."""
    return Calls(clock, lambda _: 10.0, lambda now_ms: 15.0 if busy(now_ms) else 0.05)


def test_interrupted_calls_are_excluded() -> None:
    clock = FakeClock()
    bounds = {name: interrupted(clock, lambda now_ms: int(now_ms / 130) % 3 != 0) for name in "ab"}
    blocks = measure_rounds(bounds, 20, calls=5, clock=clock)
    kept = samples(blocks, "a")
    assert not is_disturbed(blocks)
    assert len(kept) == len(quiet_spans(blocks)) >= 6
    assert {ms for times in kept for ms in times} == {10.05}
    assert all(len(times) >= 2 for times in kept)


def lost(*rounds: str) -> tuple[TimedBlock, ...]:
    """Make rounds of one a-block and one b-block, as in "x./..", where `x` is an interrupted call, `.` a clean one."""
    return tuple(
        block(index, name, [10.0 + index] * len(calls), lost_ms=tuple(5.0 if call == "x" else 0.0 for call in calls))
        for index, text in enumerate(rounds)
        for name, calls in zip("ab", text.split("/"), strict=True)
    )


def test_rounds_are_pooled_until_both_subjects_have_clean_calls() -> None:
    blocks = lost("../..", "x./..", "xx/x.", "x./xx", "../..", "x./..")
    assert quiet_spans(blocks) == [(0,), (1, 2, 3), (4,)]
    assert interrupted_share(blocks) == pytest.approx(8 / 24)
    calm = lost(*["../.."] * 3, "x./..", "xx/x.", "x./xx", *["../.."] * 3)
    assert [times.tolist() for times in samples(calm, "a")][2:5] == [[12.0, 12.0], [13.0, 15.0], [16.0, 16.0]]


def test_never_quiet_machine_is_measured_to_the_limit_and_marked_disturbed() -> None:
    clock = FakeClock()
    bounds = {name: interrupted(clock, lambda now_ms: True) for name in "ab"}
    blocks, stop = measure_pair(bounds, Plan(time_limit_s=2.0), calls=5, clock=clock)
    assert (stop, is_disturbed(blocks)) == ("time limit", True)
    assert 1.5 < clock.now_ns / 1e9 <= 2.0
    assert len(samples(blocks, "a")) == len(blocks) // 4  # no round is left out


def test_lost_time_is_read_from_the_threads_only_after_a_switch(tmp_path: Path) -> None:
    def waited(thread: str, ns: int) -> None:
        (tmp_path / thread).mkdir(exist_ok=True)
        (tmp_path / thread / "schedstat").write_text(f"700 {ns} 9")

    waited("1", 100)
    waited("2", 50)
    (tmp_path / "3").mkdir()  # ended between listing and opening
    switches = iter([3, 3, 4, 4])
    with lost_time(str(tmp_path), lambda: next(switches)) as lost_ns:
        assert lost_ns is not None
        waited("1", 1100)
        assert lost_ns() == 0  # no switch: nobody took the CPU
        assert lost_ns() == 1000
        assert lost_ns() == 0


def test_lost_time_is_read_or_absent_on_other_systems(tmp_path: Path) -> None:
    with lost_time() as lost_ns:
        assert some(lost_ns)() >= 0
    with lost_time(str(tmp_path / "none")) as lost_ns:
        assert lost_ns is None


def test_many_subjects_alternate_in_order() -> None:
    clock = FakeClock()
    blocks = measure_rounds({name: steady(clock, 60.0) for name in "abc"}, 2, calls=1, clock=clock)
    assert "".join(block.subject for block in blocks) == "abccba" + "cbaabc"


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_rounds": 3},
        {"min_rounds": 20, "max_rounds": 10},
        {"noise_rounds": 2},
        {"audit_rounds": 3},
        {"time_limit_s": 0.0},
        {"half_width_rel": float("nan")},
        {"warm_up_min_s": 20.0},
        {"warm_up_window": 2},
        {"confidence": 1.0},
    ],
)
def test_impossible_timing_plan_is_refused(wrong: dict[str, float]) -> None:
    rejects("got", Plan, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse4_2 avx2 avx512f avx512_vnni\n", True),
        ("processor\t: 0\nflags\t\t: fpu sse4_2 avx2 avx_vnni\n", True),
        ("processor\t: 0\nflags\t\t: fpu sse4_2 avx2 avx512f\nbugs\t\t: no avx_vnni\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n", None),  # ARM
        ("", None),
    ],
)
def test_vnni_is_detected_in_the_cpu_flags(tmp_path: Path, text: str, expected: bool | None) -> None:
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert has_vnni(tmp_path / "cpuinfo") is expected
    assert has_vnni(tmp_path / "absent") is None
