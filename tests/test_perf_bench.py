"""Sweeps over batch sizes, their records and summaries, with fake runners on a fake clock."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import Missing, is_out_of_memory
from ground.feeds import Feeds, batch_size, select_rows
from ground.ports import LOGITS, OutputPort, Port, image_port
from perf.bench.bench import BenchSubject, bench_subjects
from perf.record.runs import Bench, Flat, differing_keys, load_bench, save_bench
from perf.runners.protocol import Ledger, MemoryGauge, resident_gauge
from perf.stats.summary import find_knee, summarise
from perf.timing.gpu import Gpu
from perf.timing.laps import Bound, Clock, Laps, Plan
from perf.timing.watch import environment, fingerprint, watching
from tests.doubles import DoubleOfRunner, FakeClock, some
from tests.nvml import FakeNvml
from tests.refusals import rejects, reports_missing

PLAN = Plan(min_rounds=6, max_rounds=12, time_limit_s=5.0, noise_rounds=6)
FEEDS = {"images": np.zeros((4, 3, 2, 2), np.float32)}
MACHINE: Flat = {"system": "Linux", "cpu": "a cpu", "cpu_count": 2, "gpu": None}


@dataclass
class FakeRunner(DoubleOfRunner):
    """A runner whose calls take `call_ms(batch) * uneven(call)`, and whose bind raises what `call_ms` raises."""

    clock: FakeClock
    call_ms: Callable[[int], float]
    precision: str = "fp32"
    copies_ms: float = 0.0
    opening_ms: float = 0.0
    uneven: Callable[[int], float] = lambda call: 1.0
    log: list[int] = field(default_factory=list)
    batch: int = 0
    calls: int = 0
    inputs: tuple[Port, ...] = (image_port((3, 2, 2)),)
    outputs: tuple[OutputPort, ...] = (LOGITS,)

    def __enter__(self) -> Self:
        self.clock.pass_ms(self.opening_ms)
        return self

    def bind(self, feeds: Feeds) -> Bound:
        self.call_ms(batch_size(feeds))
        return replace(self, batch=batch_size(feeds))

    def laps(self, calls: int, clock: Clock) -> Laps:
        self.log += [self.batch] * calls
        call_ms = self.call_ms(self.batch)
        compute = tuple(call_ms * self.uneven(self.calls + call) for call in range(calls))
        self.calls += calls
        both = tuple(ms + self.copies_ms for ms in compute) if self.copies_ms else None
        wall_ms = sum(compute) + calls * self.copies_ms
        self.clock.pass_ms(wall_ms)
        return Laps(calls=calls, wall_ms=wall_ms, compute_ms=compute, end_to_end_ms=both)

    def describe(self) -> Flat:
        return {"backend": "fake", "device": "cpu", "precision": self.precision, "model": "any"}


def measured(
    dense_ms: Callable[[int], float],
    reduced_ms: Callable[[int], float],
    batches: tuple[int, ...] = (1, 8),
    *,
    plan: Plan = PLAN,
    streams: int = 1,
    flush_l2: bool = False,
    clock: FakeClock | None = None,
    made_s: float = 0.0,
    **runner: Any,
) -> Bench:
    clock = clock or FakeClock()
    dense = BenchSubject(name="dense", open=lambda: FakeRunner(clock, dense_ms, **runner), macs=1000)
    reduced = BenchSubject(name="reduced", open=lambda: FakeRunner(clock, reduced_ms, **runner), macs=600)
    return bench_subjects(
        (dense, reduced), FEEDS, batches, plan, streams=streams, flush_l2=flush_l2, described=MACHINE, clock=clock,
        made_s=made_s,
    )  # fmt: skip


def out_of_memory_from(limit: int, ms: float) -> Callable[[int], float]:
    def call_ms(batch: int) -> float:
        if batch >= limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return ms * batch

    return call_ms


def test_sweep_measures_reduced_beside_dense_and_dense_against_itself() -> None:
    record = measured(lambda batch: 2.0 * batch, lambda batch: 1.6 * batch)
    assert [row.batch for row in record.rows] == [1, 8]
    assert {block.subject for block in record.rows[0].noise_blocks} == {"dense", "dense again"}
    read = summarise(record)
    row = some(read.row(8))
    assert some(row.speedup).value == pytest.approx(1.25)
    assert some(row.noise).value == 1.0
    assert row.realised_share == pytest.approx((1 - 0.8) / 0.4)
    assert some(row.sides["dense"].p50_ms).value == 16.0
    assert some(row.sides["reduced"].throughput).value == pytest.approx(1000 / 1.6)
    assert read.end_to_end_rows == ()


def test_end_to_end_and_compute_times_are_separate() -> None:
    read = summarise(measured(lambda batch: 4.0, lambda batch: 2.0, copies_ms=1.0))
    assert some(some(read.row(8)).speedup).value == 2.0
    assert some(some(read.row(8, "end_to_end")).speedup).value == pytest.approx(5 / 3)


def test_streams_report_throughput_only() -> None:
    read = summarise(measured(lambda batch: 4.0, lambda batch: 2.0, streams=3))
    side = read.rows[0].sides["dense"]
    assert (side.p50_ms, side.p90_ms, side.samples) == (None, None, 0)
    assert side.throughput is not None
    assert read.rows[0].speedup is not None


def test_flushing_the_l2_cache_omits_throughput() -> None:
    assert summarise(measured(lambda b: 4.0, lambda b: 2.0, flush_l2=True)).rows[0].sides["dense"].throughput is None


def test_batch_out_of_memory_stays_in_the_table_and_other_subject_is_measured() -> None:
    record = measured(out_of_memory_from(8, 1.0), lambda batch: 1.0 * batch, (1, 8, 16))
    assert [row.trials["dense"].status for row in record.rows] == ["ok", "oom", "oom"]
    assert record.rows[1].stop == "one subject only"
    row = some(summarise(record).row(8))
    assert row.speedup is None
    assert row.sides["reduced"].p50_ms is not None
    assert any("batch 8, dense: out of memory: RuntimeError: CUDA out of memory" in text for text in record.warnings)


@pytest.mark.slow("measurement")
def test_failed_batch_keeps_its_message() -> None:
    def broken(batch: int) -> float:
        raise ValueError("invalid shape")

    def broken_at_8(batch: int) -> float:
        return broken(batch) if batch == 8 else 1.0

    record = measured(broken_at_8, broken_at_8)
    assert record.rows[1].trials["reduced"].message == "ValueError: invalid shape"
    assert record.rows[1].stop == "nothing to measure"
    assert summarise(record).rows[1].sides["dense"].p50_ms is None
    with pytest.raises(Missing, match=r"dense failed at every batch size.*batch 1: ValueError: invalid shape; batch 8"):
        measured(broken, broken)
    reports_missing("reduced failed at every batch size", measured, lambda batch: 1.0, broken)


def test_bench_without_any_time_raises() -> None:
    """A record in which only the dense model runs out of memory still has the times of the reduced model."""
    with pytest.raises(Missing, match=r"nothing could be measured.*ask for smaller --batch"):
        measured(out_of_memory_from(1, 1.0), out_of_memory_from(1, 1.0))
    record = measured(out_of_memory_from(1, 1.0), lambda batch: 1.0)
    assert {row.stop for row in record.rows} == {"one subject only"}


def test_missing_package_ends_the_sweep() -> None:
    def raise_missing(batch: int) -> float:
        raise Missing("no GPU")

    reports_missing("no GPU", measured, raise_missing, lambda batch: 1.0)


def wandering(call: int) -> float:
    """Return a factor between 0.9 and 1.1 that varies by call, so that no interval shrinks to a point."""
    return 1.0 + 0.1 * ((call * 7) % 11 - 5) / 5


ENDLESS = Plan(half_width_rel=1e-9)
CALLS_MS = st.sampled_from([0.3, 2.0, 30.0, 200.0, 1500.0, 9000.0])


@pytest.mark.slow("measurement")
@settings(max_examples=20, deadline=None)
@given(CALLS_MS, CALLS_MS, st.sampled_from([0.2, 3.0, 20.0]), st.booleans(), st.sampled_from([1, 3]), st.data())
def test_time_limit_covers_opening_warm_up_and_a_a_run(
    dense_ms: float, reduced_ms: float, limit_s: float, audit: bool, streams: int, data: st.DataObject
) -> None:
    """Slow first calls and the audit count too; only a call under way may end after the limit."""
    clock = FakeClock()
    cold, minimum = data.draw(st.sampled_from([1.0, 6.0])), data.draw(st.sampled_from([0.0, 0.2, 5.0]))
    plan = replace(ENDLESS, time_limit_s=limit_s, audit_rounds=8 * audit, warm_up_min_s=minimum)
    record = measured(
        lambda batch: dense_ms, lambda batch: reduced_ms, (4,), plan=plan, streams=streams, clock=clock,
        opening_ms=limit_s * 1e3 / 10 / streams, uneven=lambda call: wandering(call) * (cold if call == 0 else 1.0),
    )  # fmt: skip
    longest_s = streams * cold * 1.1 * max(dense_ms, reduced_ms) / 1e3
    assert clock.now_ns / 1e9 <= limit_s + longest_s
    (row,) = record.rows
    assert (row.stop == "out of time") == (summarise(record).rows[0].speedup is None)
    assert bool(record.warnings) or row.stop != "out of time"


def test_batch_size_without_time_is_reported_and_others_are_unaffected() -> None:
    clock, log = FakeClock(), list[int]()
    plan = replace(PLAN, time_limit_s=3.0)
    dense, reduced = (lambda batch: 10.0 * batch), (lambda batch: 8.0 * batch)
    record = measured(dense, reduced, (100, 1, 400), plan=plan, clock=clock, log=log)
    late, fast, larger = record.rows
    assert (late.stop, fast.stop, larger.stop) == ("out of time", "narrow", "out of time")
    assert log.count(100) == 2  # two calls of the dense model, since its first one alone might have been slow
    assert log.count(400) == 0
    alone = measured(dense, reduced, (1,), plan=plan)
    assert summarise(record).rows[1] == summarise(alone).rows[0]
    # 2 s of calls, plus 1.5 x 1.1 x 13 calls of 1 s for each model, as the time of the reduced one is unknown.
    words = "it takes about 45 s, the limit is 3 s; give --time-limit 45"
    assert late.trials["dense"].message == late.trials["reduced"].message == words
    assert late.trials["dense"].warm_up_samples_ms == (1000.0, 1000.0)
    assert f"batch 100, not measured: {words}" in record.warnings
    assert "batch 400, not measured: going by batch 100 it takes about 180 s" in " ".join(record.warnings)
    read = summarise(record)
    assert [row.speedup is None for row in read.rows] == [True, False, True]
    assert read.knee is None
    assert clock.now_ns / 1e9 < 2 + 3


@pytest.mark.slow("measurement")
def test_advised_time_limit_suffices() -> None:
    def measured_within(limit_s: float) -> Bench:
        plan = replace(ENDLESS, time_limit_s=limit_s)
        return measured(lambda batch: 100.0, lambda batch: 80.0, (8,), plan=plan, opening_ms=100.0, uneven=wandering)

    (late,) = measured_within(1.5).rows
    assert late.stop == "out of time"
    advised = float(str(late.trials["dense"].message).rpartition(" ")[2])
    row = summarise(measured_within(advised)).rows[0]
    assert some(row.speedup).is_bounded
    assert row.noise is None
    again = measured_within(3 * advised)
    assert summarise(again).rows[0].noise is not None
    assert not any("A/A" in warning for warning in again.warnings)


def test_missing_time_skips_audit_and_a_a_run_with_a_warning() -> None:
    plan = replace(ENDLESS, time_limit_s=5.0, audit_rounds=8)
    record = measured(lambda batch: 100.0, lambda batch: 80.0, (8,), plan=plan, uneven=wandering)
    row = summarise(record).rows[0]
    assert some(row.speedup).is_bounded
    assert (row.noise, row.repeats) == (None, {})
    warnings = " ".join(record.warnings)
    assert "batch 8, no time for the A/A run" in warnings
    assert "batch 8, reduced: no time to try it on varied batches" in warnings


def test_slow_first_call_does_not_prevent_the_measurement() -> None:
    record = measured(lambda b: 5.0, lambda b: 4.0, (8,), uneven=lambda call: 200.0 if call == 0 else 1.0)
    assert record.rows[0].stop == "narrow"


def test_first_call_that_takes_all_the_time_is_reported_without_an_estimate() -> None:
    record = measured(lambda b: 5.0, lambda b: 4.0, uneven=lambda call: 2000.0 if call == 0 else 1.0)
    assert [row.stop for row in record.rows] == ["out of time"] * 2  # the larger batch size is tried too
    assert "binding it and its first call took 10 s of 5; give a longer --time-limit" in record.warnings[0]


@pytest.mark.slow("measurement")
def test_opening_time_is_shared_equally_by_batch_sizes() -> None:
    def time_taken(opening_ms: float, made_s: float = 0.0) -> tuple[float, Bench]:
        clock, plan = FakeClock(), replace(ENDLESS, time_limit_s=4.0, noise_rounds=0)
        record = measured(
            lambda b: 10.0, lambda b: 8.0, plan=plan, clock=clock, made_s=made_s, opening_ms=opening_ms,
            uneven=wandering,
        )  # fmt: skip
        assert all(row.speedup is not None and row.speedup.is_bounded for row in summarise(record).rows)
        return clock.now_ns / 1e9, record

    assert time_taken(0.0)[0] == pytest.approx(8.0, abs=0.4)
    assert time_taken(1000.0)[0] == pytest.approx(8.0, abs=0.4)
    assert time_taken(0.0, made_s=3.0)[0] == pytest.approx(5.0, abs=0.4)
    took_s, record = time_taken(9000.0)
    assert took_s == pytest.approx(18.0 + 2 * 2.0, abs=0.4)
    assert record.warnings[0].startswith("exporting and loading took 18 s, and --time-limit 4 allows 8 s for all")


def test_single_subject_obeys_the_time_limit() -> None:
    def reduced(batch: int) -> float:
        return 2000.0 if batch == 64 else 200.0

    clock, plan = FakeClock(), replace(ENDLESS, time_limit_s=4.0)
    record = measured(out_of_memory_from(8, 1.0), reduced, (8, 1, 64), plan=plan, clock=clock)
    assert [row.stop for row in record.rows] == ["one subject only", "time limit", "out of time"]
    assert {name: trial.status for name, trial in record.rows[2].trials.items()} == {
        "dense": "oom",
        "reduced": "out of time",
    }
    assert clock.now_ns / 1e9 <= 3 * 4.0


@pytest.mark.parametrize(
    ("batches", "streams", "message"),
    [((), 1, "at least one"), ((0,), 1, "positive"), ((2, 2), 1, "each once"), ((1,), 0, "streams")],
)
def test_impossible_plan_is_refused(batches: tuple[int, ...], streams: int, message: str) -> None:
    rejects(message, measured, lambda batch: 1.0, lambda batch: 1.0, batches, streams=streams)


def test_subjects_with_equal_names_are_refused() -> None:
    same = BenchSubject(name="dense", open=lambda: FakeRunner(FakeClock(), lambda batch: 1.0))
    rejects("different names", bench_subjects, (same, same), FEEDS, [1], PLAN)


def test_progress_rises_monotonically_below_one() -> None:
    clock, shares = FakeClock(), list[float]()
    subjects = [BenchSubject(name=name, open=lambda: FakeRunner(clock, lambda batch: 2.0)) for name in ("a", "b")]
    bench_subjects(
        (subjects[0], subjects[1]), FEEDS, [1, 2], PLAN, described=MACHINE, clock=clock,
        progress=lambda share, text: shares.append(share),
    )  # fmt: skip
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] <= 1.0


def test_bench_record_round_trips(tmp_path: Path) -> None:
    record = measured(out_of_memory_from(8, 1.0), lambda batch: 1.0 * batch, copies_ms=0.5)
    save_bench(record, tmp_path / "bench.json")
    assert load_bench(tmp_path / "bench.json") == record
    document = json.loads((tmp_path / "bench.json").read_text())
    assert (document["kind"], document["version"]) == ("bench", 1)


def test_records_of_different_machines_or_precisions_are_not_comparable() -> None:
    record = measured(lambda batch: 2.0, lambda batch: 1.0)
    assert differing_keys(record, record) == {}
    moved = replace(record, environment={**record.environment, "cpu": "another cpu", "load_average": 3.0})
    assert differing_keys(record, moved) == {"cpu": ("a cpu", "another cpu")}
    halved = measured(lambda batch: 2.0, lambda batch: 1.0, precision="fp16")
    assert differing_keys(record, halved)["reduced.precision"] == ("fp32", "fp16")


def test_knee_is_the_batch_where_doubling_stops_paying() -> None:
    assert some(find_knee({1: 100.0, 2: 190.0, 4: 340.0, 8: 360.0, 16: 365.0})).batch == 4
    rising = some(find_knee({1: 100.0, 2: 200.0, 4: 400.0}))
    assert (rising.batch, "still rises" in rising.reason) == (4, True)
    assert some(find_knee({1: 100.0, 2: 100.0, 4: 200.0})).batch == 4
    assert find_knee({1: 100.0}) is None


def test_runner_memory_is_its_held_bytes_plus_its_last_peak() -> None:
    """Opening goes from 100 to 150 bytes; the phase after it peaks 70 above its start and leaves 20 allocated.

    The 500 bytes that another runner allocates in between don't count.
    """
    readings, peaks = iter([100, 150, 650, 670]), iter([160, 720])
    ledger = Ledger(MemoryGauge("fake", lambda: None, lambda: next(readings), lambda: next(peaks)))
    assert ledger.phase(lambda: "opened") == ("opened", 60)
    assert ledger.phase(lambda: None) == (None, 50 + 70)
    assert ledger.held_bytes == 70


def test_resident_set_gauge_sees_an_allocation() -> None:
    gauge = some(resident_gauge())
    gauge.reset_peak()
    before = gauge.now()
    # So large that it is mapped anew, instead of reusing memory that earlier tests freed.
    block = np.ones(256 * 2**20, np.uint8)
    assert gauge.peak() - before > 0.9 * block.nbytes


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("Failed to allocate memory for requested buffer of size 1"), True),
        (RuntimeError("invalid shape"), False),
    ],
)
def test_running_out_of_memory_is_recognised(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_gpu_state_names_throttling_and_counts_foreign_processes() -> None:
    gpu = Gpu(FakeNvml(), object(), (7,))
    state = gpu.state()
    assert state.throttle == ("sw_power_cap", "hw_thermal_slowdown")
    assert (state.sm_clock_mhz, state.temperature_c, state.power_w, state.foreign_processes) == (1410, 61, None, 1)
    assert state.power_limit_w == 300.0
    told = environment(gpu.describe())
    assert (told["gpu"], told["sm"], told["cuda"], told["power_limit_w"]) == ("A Card", "8.6", "13.2", 300.0)
    assert told["clocks"] is None


@pytest.mark.parametrize(("uuid", "handle"), [(None, 0), ("GPU-b", "GPU-b"), ("GPU-c", 0)])
def test_gpu_that_cuda_runs_on_is_watched(monkeypatch: pytest.MonkeyPatch, uuid: str | None, handle: object) -> None:
    """CUDA may number cards otherwise than NVML; for an identifier that NVML lacks, its first card is watched."""
    asked: list[object] = []

    class TwoCards(FakeNvml):
        def nvmlDeviceGetName(self, handle: object) -> str:
            asked.append(handle)
            return "A Card"

    monkeypatch.setattr("perf.timing.gpu.open_nvml", lambda: TwoCards(uuids=("GPU-a", "GPU-b")))
    with watching(uuid) as (_, described):
        assert described is not None
    assert asked == [handle]


def test_environment_is_flat_and_its_fingerprint_ignores_the_current_load() -> None:
    told = environment()
    json.dumps(told)
    assert told["gpu"] is None
    assert told["torch"] is not None
    assert fingerprint(told) == fingerprint({**told, "load_average": -1.0})
    assert fingerprint(told) != fingerprint({**told, "cpu": "another"})


def test_images_beyond_memory_are_reported_as_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_small_batch(feeds: Feeds, batch: int) -> Feeds:
        if batch == 8:
            raise MemoryError("Unable to allocate 38.6 GiB")
        return select_rows(feeds, slice(batch))

    monkeypatch.setattr("perf.bench.opened_subject.fill_batch", fill_small_batch)
    record = measured(lambda batch: 2.0, lambda batch: 1.0)
    assert [row.trials["dense"].status for row in record.rows] == ["ok", "oom"]


def test_drifting_machine_gives_a_value_without_an_interval() -> None:
    clock, plan = FakeClock(), replace(PLAN, noise_rounds=0)

    def uneven(call: int) -> float:
        return 60.0 if clock.now_ns / 1e9 > 0.55 else 1.0

    record = measured(lambda b: 10.0, lambda b: 8.0, (8,), plan=plan, clock=clock, uneven=uneven)
    row = summarise(record).rows[0]
    assert (record.rows[0].stop, 0 < row.rounds < 6) == ("time limit", True)
    assert not some(row.speedup).is_bounded
    assert "rounds are too few for an interval, 6 make one" in " ".join(record.warnings)
