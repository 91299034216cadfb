"""Energy by a simulated counter and a simulated sysfs tree; no test needs a sensor, and none was measured on one."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from ground.feeds import Feeds
from perf.bench.bench import BenchSubject, bench_subjects
from perf.bench.energy import REST_S, EnergyMeter
from perf.gate.evidence import Evidence
from perf.gate.gate import JudgedRule, judge
from perf.gate.rule import rule_from_text
from perf.record.energy import EnergyBlock, EnergyRun
from perf.record.runs import ENERGY, Bench, load_bench, save_bench
from perf.record.states import GpuState, MachineState
from perf.stats.energy import EnergySummary, energy_warnings, summarise_energy
from perf.stats.summary import summarise
from perf.timing import energy
from perf.timing.energy import NoSensor, Nvml, Rapl, find_rapl, open_nvml_sensor, open_sensor
from perf.timing.gpu import Gpu
from perf.timing.laps import Bound, Plan
from tests.doubles import DoubleOfRunner, FakeClock, some
from tests.histories import bench_of_release
from tests.nvml import FakeNvml
from tests.powered import SUBJECTS, FakeSensor, Powered, energy_of
from tests.refusals import rejects

NAMES = ("dense", "reduced")
BATCH = 8


def silent(text: str) -> None:
    """Report nothing."""


def meter_of(sensor: FakeSensor, limit_s: float = 60.0, **more: Any) -> EnergyMeter:
    """Make a meter whose clock passes while it sleeps."""
    clock = sensor.clock
    return EnergyMeter(sensor=sensor, limit_s=limit_s, clock=clock, sleep=lambda s: clock.pass_ms(1e3 * s), **more)


def bounds_of(*subjects: Powered) -> dict[str, tuple[Bound, float]]:
    return {name: (each, each.call_ms / 1e3) for name, each in zip(SUBJECTS, subjects, strict=True)}


def measured(meter: EnergyMeter, *subjects: Powered) -> EnergyRun:
    found = meter.measure(bounds_of(*subjects), BATCH, silent)
    assert isinstance(found, EnergyRun), found
    return found


@pytest.mark.parametrize("period_s", [0.1, 0.001])
def test_joules_per_image_are_those_of_the_calls_without_the_idle_machines(period_s: float) -> None:
    """100 W more for 10 ms are 1 J for 8 images, and 80 W more for 6 ms are 0.48 J; the idle machine takes 50 W."""
    sensor = FakeSensor(FakeClock(), period_s=period_s)
    dense, reduced = Powered(sensor, 10.0, 100.0), Powered(sensor, 6.0, 80.0)
    found = summarise_energy(measured(meter_of(sensor), dense, dense, reduced), NAMES)
    assert found.idle_w == pytest.approx(50.0, rel=0.01)
    assert some(found.joules["dense"]).value == pytest.approx(1 / BATCH, rel=0.01)
    assert some(found.joules["reduced"]).value == pytest.approx(0.48 / BATCH, rel=0.01)
    assert some(found.ratio).value == pytest.approx(1 / 0.48, rel=0.01)
    assert some(found.noise).value == pytest.approx(1.0, rel=0.01)
    assert found.rounds == 8
    assert some(found.ratio).is_bounded
    assert [*energy_warnings(found, NAMES)] == []


def test_blocks_are_interleaved_forth_and_back_between_two_pauses() -> None:
    sensor = FakeSensor(FakeClock())
    dense, reduced = Powered(sensor, 10.0, 100.0), Powered(sensor, 6.0, 80.0)
    run = measured(meter_of(sensor), dense, dense, reduced)
    order = [block.subject for block in run.blocks]
    assert order == [*SUBJECTS, *SUBJECTS[::-1]] * (len(order) // 6)
    assert [block.round for block in run.blocks] == [index // 3 for index in range(len(order))]
    assert [block.subject for block in run.idle] == ["idle", "idle"]
    assert sensor.clock() / 1e9 <= 60.0


@pytest.mark.parametrize(("period_s", "least_s"), [(0.001, 2.0), (0.1, 2.0), (0.5, 10.0)])
def test_blocks_last_seconds_and_twenty_updates_of_the_counter(period_s: float, least_s: float) -> None:
    sensor = FakeSensor(FakeClock(), period_s=period_s)
    dense = Powered(sensor, 10.0, 100.0)
    run = measured(meter_of(sensor, 300.0), dense, dense, dense)
    assert all(least_s <= block.seconds <= least_s + 2 * period_s + 0.1 for block in (*run.idle, *run.blocks))


def test_blocks_begin_and_end_with_an_update_of_a_slow_counter() -> None:
    """Without that, a counter of 2 s would be read up to 2 s of 40 s too early or too late, which is 5 %."""
    sensor = FakeSensor(FakeClock(), period_s=2.0)
    dense = Powered(sensor, 10.0, 100.0)
    run = measured(meter_of(sensor, 900.0), dense, dense, dense)
    own = [(block.joules - 50.0 * block.seconds) / block.images for block in run.blocks]
    assert own == pytest.approx([1 / BATCH] * len(own), rel=0.015)


def test_steady_rise_of_power_does_not_bias_the_ratio() -> None:
    """The power of equal subjects rises by a percent a second, as that of a warming chip; they are 2 s to 4 s apart."""
    sensor = FakeSensor(FakeClock())
    same = Powered(sensor, 10.0, 100.0, rise_per_s=0.01)
    found = summarise_energy(measured(meter_of(sensor, 95.0), same, same, same), NAMES)
    assert found.rounds % 2 == 0
    assert some(found.ratio).value == pytest.approx(1.0, abs=0.005)
    assert some(found.noise).value == pytest.approx(1.0, abs=0.005)


def test_machine_rests_before_each_pause() -> None:
    """The chip is still hot and its clocks are high after a load, as after the measurement of latency."""
    sensor, slept = FakeSensor(FakeClock()), list[tuple[float, float]]()

    def sleep(seconds: float) -> None:
        slept.append((sensor.clock() / 1e9, seconds))
        sensor.clock.pass_ms(1e3 * seconds)

    dense = Powered(sensor, 10.0, 100.0)
    run = measured(replace(meter_of(sensor), sleep=sleep), dense, dense, dense)
    rests = [at_s for at_s, seconds in slept if seconds == REST_S]
    assert len(rests) == len(run.idle)
    assert rests[0] == 0.0
    assert rests[1] > sum(block.seconds for block in run.blocks)


def test_energy_without_enough_time_takes_none() -> None:
    sensor = FakeSensor(FakeClock())
    dense = Powered(sensor, 10.0, 100.0)
    found = meter_of(sensor, 9.0).measure(bounds_of(dense, dense, dense), BATCH, silent)
    assert found == "no time for the energy, it takes 19 s at least; give a longer --energy-time"
    assert sensor.clock() == 0


def test_counter_that_stands_still_is_no_measurement() -> None:
    sensor = FakeSensor(FakeClock(), stands_after_s=9.0)
    dense = Powered(sensor, 10.0, 100.0)
    found = meter_of(sensor).measure(bounds_of(dense, dense, dense), BATCH, silent)
    assert isinstance(found, str)
    assert found.startswith("no energy: the counter of a counter stood still for 2.")


def test_counter_that_can_no_longer_be_read_is_no_measurement() -> None:
    class Lost(FakeSensor):
        def joules(self) -> float:
            raise OSError("No such device")

    sensor = Lost(FakeClock())
    dense = Powered(sensor, 10.0, 100.0)
    assert meter_of(sensor).measure(bounds_of(dense, dense, dense), BATCH, silent) == "no energy: No such device"


HOT = GpuState(
    sm_clock_mhz=9, memory_clock_mhz=9, temperature_c=99, power_w=9.0, throttle=("hw_slowdown",), foreign_processes=0
)


def test_throttled_energy_is_marked() -> None:
    sensor = FakeSensor(FakeClock())
    dense = Powered(sensor, 10.0, 100.0)
    found = summarise_energy(
        measured(meter_of(sensor, watch=lambda: MachineState(gpu=HOT)), dense, dense, dense), NAMES
    )
    assert found.throttled == ("hw_slowdown",)
    assert any("hw_slowdown" in text for text in energy_warnings(found, NAMES))


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ({"rounds": 2}, "energy: 2 rounds are too few for an interval, 6 make one; give a longer --energy-time"),
        ({"joules": {}}, "dense: it takes no more power than the idle machine (50.0 W), so it has no joules"),
        (
            {"idle_after_w": 70.0},
            "energy: idle power moved from 50.0 to 70.0 W; other programs ran, or it was still hot",
        ),
    ],
)
def test_each_doubt_of_energy_is_named(changed: Mapping[str, Any], warning: str) -> None:
    found = replace(summarise_energy(energy_of({"dense": 1.0, "reduced": 0.5}), NAMES), **changed)
    assert warning in [*energy_warnings(found, NAMES)]


def test_subject_that_takes_no_more_than_the_idle_machine_has_no_joules() -> None:
    run = energy_of({"dense": 1.0, "dense again": 1.0, "reduced": -0.01})
    found = summarise_energy(run, NAMES)
    assert found.joules.keys() == {"dense"}
    assert found.ratio is None
    assert some(found.noise).value == pytest.approx(1.0, rel=0.05)


def test_recorded_energy_needs_pauses_and_images() -> None:
    block = energy_of({"dense": 1.0}).blocks[0]
    rejects("got|has", EnergyBlock, round=0, subject="a", seconds=0.0, joules=1.0, images=1)
    rejects("pauses without images", EnergyRun, sensor="x", period_s=0.1, idle=(block,), blocks=(block,))


# Sensors

PACKAGES = {"intel-rapl:0": ("package-0", 300, 1000), "intel-rapl:1": ("package-1", 40, 1000)}
OTHERS = {
    "intel-rapl:0:0": ("core", 200, 1000),
    "intel-rapl:0:1": ("dram", 99, 1000),
    "intel-rapl:2": ("psys", 900, 1000),
    "intel-rapl-mmio:0": ("package-0", 300, 1000),
}


def powercap(root: Path, domains: Mapping[str, tuple[str, int, int]]) -> Path:
    """Write a tree as Linux has it, with energies and ranges in joules."""
    for domain, (name, joules, range_j) in domains.items():
        (root / domain).mkdir(parents=True, exist_ok=True)
        files = {"name": name, "energy_uj": f"{joules}000000", "max_energy_range_uj": f"{range_j}000000"}
        for file, text in files.items():
            (root / domain / file).write_text(f"{text}\n")
    return root


def test_rapl_adds_the_packages_alone(tmp_path: Path) -> None:
    sensor = find_rapl(powercap(tmp_path, PACKAGES | OTHERS))
    assert isinstance(sensor, Rapl)
    assert sensor.name == "RAPL of package-0, package-1"
    before = sensor.joules()
    moved = {name: (kind, joules + 10, range_j) for name, (kind, joules, range_j) in (PACKAGES | OTHERS).items()}
    powercap(tmp_path, moved)
    assert sensor.joules() - before == 20.0


def test_rapl_counts_on_when_a_counter_starts_again(tmp_path: Path) -> None:
    sensor = find_rapl(powercap(tmp_path, {"intel-rapl:0": ("package-0", 990, 1000)}))
    assert isinstance(sensor, Rapl)
    readings = [sensor.joules()]
    for joules in (998, 3, 700, 999, 1):
        powercap(tmp_path, {"intel-rapl:0": ("package-0", joules, 1000)})
        readings.append(sensor.joules())
    assert np.diff(readings).tolist() == [8, 5, 697, 299, 2]


def test_unreadable_rapl_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(energy, "read_number", refused)
    found = find_rapl(powercap(tmp_path, PACKAGES))
    assert isinstance(found, NoSensor)
    assert found.reason == "RAPL may be read by root only"
    assert f"chmod a+r {tmp_path}/intel-rapl:*/energy_uj" in found.remedy


def test_machine_without_rapl_or_with_a_broken_one_says_so(tmp_path: Path) -> None:
    assert "no RAPL here" in str(find_rapl(tmp_path / "absent"))
    assert "no RAPL here" in str(find_rapl(powercap(tmp_path, OTHERS)))
    powercap(tmp_path, PACKAGES)
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("\n")
    assert "RAPL can't be read (invalid literal" in str(find_rapl(tmp_path)), "one package alone would be too little"


def test_gpu_counts_millijoules(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(energy_mj=lambda: 12_345)
    monkeypatch.setattr("perf.timing.gpu.open_nvml", lambda: nvml)
    with open_sensor("cuda") as sensor:
        assert isinstance(sensor, Nvml)
        assert (sensor.name, sensor.period_s, sensor.joules()) == ("NVML of A Card", 0.1, 12.345)
        nvml.energy_mj = None
        with pytest.raises(OSError, match="NVML no longer answers"):
            sensor.joules()
    assert nvml.shut


@pytest.mark.parametrize(
    ("nvml", "uuid", "reason"),
    [
        (None, None, "NVML finds no such GPU"),
        (FakeNvml(energy_mj=lambda: 1, uuids=("GPU-a",)), "MIG-b", "a MIG slice has no counter"),
        (FakeNvml(), None, "A Card has no energy counter"),
    ],
)
def test_gpu_without_a_counter_of_its_own_has_no_sensor(
    nvml: FakeNvml | None, uuid: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perf.timing.gpu.open_nvml", lambda: nvml)
    with open_nvml_sensor(uuid) as found:
        assert isinstance(found, NoSensor)
        assert reason in found.reason


# Bench


class Runner(DoubleOfRunner):
    """A runner whose calls draw power."""

    def __init__(self, powered: Powered) -> None:
        self.powered = powered

    inputs = ()
    outputs = ()

    def __enter__(self) -> Self:
        self.powered.sensor.clock.pass_ms(1500.0)
        return self

    def bind(self, feeds: Feeds) -> Bound:
        return self.powered


def bench_with(sensor: FakeSensor, *, energy_s: float = 60.0, none: NoSensor | None = None) -> Bench:
    plan = Plan(min_rounds=6, max_rounds=12, time_limit_s=5.0, noise_rounds=6)
    subjects = (
        BenchSubject(name="dense", open=lambda: Runner(Powered(sensor, 70.0, 100.0))),
        BenchSubject(name="reduced", open=lambda: Runner(Powered(sensor, 42.0, 80.0))),
    )
    feeds = {"images": np.zeros((1, 3, 2, 2), np.float32)}
    return bench_subjects(
        subjects, feeds, (1, 8), plan, described={}, clock=sensor.clock, meter=none or meter_of(sensor, energy_s)
    )


def test_bench_records_energy_after_latency_and_beyond_its_time_limit(tmp_path: Path) -> None:
    sensor = FakeSensor(FakeClock())
    bench = bench_with(sensor)
    save_bench(bench, tmp_path / "bench.json")
    assert load_bench(tmp_path / "bench.json") == bench
    assert (bench.settings[ENERGY], bench.settings["energy_s"]) == ("a counter", 60.0)
    assert not any("energy" in text for text in bench.warnings)
    rows = summarise(bench).rows
    assert [some(row.joules("dense")).value * row.batch for row in rows] == pytest.approx([7.0, 7.0], rel=0.02)
    assert [some(row.joules("reduced")).value * row.batch for row in rows] == pytest.approx([3.36, 3.36], rel=0.02)
    quick = bench_with(FakeSensor(FakeClock()), none=NoSensor("none here", "buy one"))
    for with_energy, without in zip(bench.rows, quick.rows, strict=True):
        assert replace(with_energy, energy=None) == without, "energy takes no time from latency"
    assert all(row.energy is None for row in quick.rows)
    assert quick.settings[ENERGY] == "none here; buy one"


def test_bench_without_time_for_energy_says_so() -> None:
    bench = bench_with(FakeSensor(FakeClock()), energy_s=REST_S)
    assert all(row.energy is None for row in bench.rows)
    assert "batch 8, no time for the energy, it takes 19 s at least; give a longer --energy-time" in bench.warnings


# Gate


def with_energy(run: EnergyRun | None, sensor: str = "RAPL of package-0", **more: Any) -> Bench:
    bench = bench_of_release(0, 4.0, batches=(8,))
    (row,) = bench.rows
    return replace(bench, settings={ENERGY: sensor}, rows=(replace(row, energy=run, **more),))


def judged(rule: str, bench: Bench, baseline: Bench | None = None) -> JudgedRule:
    older = None if baseline is None else Evidence(bench=baseline)
    (only,) = judge([rule_from_text(rule)], Evidence(bench=bench), older).rules
    return only


PLANTED = {"dense": 2.0, "dense again": 2.0, "reduced": 1.5}


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        ("joules@b8 > dense * 0.8", "PASS"),
        ("joules@b8 > dense * 0.7", "FAIL"),
        ("joules@b8 > dense * 0.75", "INCONCLUSIVE"),
        ("joules@b8 > 1.6", "PASS"),
        ("dense.joules@b8 > 1.6", "FAIL"),
    ],
)
def test_rules_on_joules_are_judged_by_their_interval(rule: str, verdict: str) -> None:
    found = judged(rule, with_energy(energy_of(PLANTED)))
    assert found.verdict == verdict, found.message


def test_joules_have_the_narrow_interval_of_the_ratio_of_each_round() -> None:
    """Load that both subjects share moves joules of a round by 30 %, but not their ratio."""
    run, shared = energy_of(PLANTED), np.random.default_rng(1).lognormal(sigma=0.3, size=8)
    moved = [100.0 + (each.joules - 100.0) * float(shared[each.round]) for each in run.blocks]
    blocks = tuple(replace(each, joules=joules) for each, joules in zip(run.blocks, moved, strict=True))
    bench = with_energy(replace(run, blocks=blocks))
    alone, found = judged("joules@b8 > 9", bench), judged("joules@b8 > dense * 0.5", bench)
    assert some(alone.high) / some(alone.low) > 1.3
    assert some(found.high) / some(found.low) < 1.05
    assert found.verdict == "FAIL", found.message


def test_too_few_rounds_of_energy_are_inconclusive() -> None:
    found = judged("joules@b8 > dense * 0.8", with_energy(energy_of(PLANTED, rounds=4)))
    assert found.verdict == "INCONCLUSIVE"
    assert "only 4 rounds were kept" in found.message


def test_rule_on_joules_without_a_sensor_is_inconclusive_and_says_why() -> None:
    found = judged("joules@b8 > dense * 0.8", with_energy(None, "RAPL may be read by root only; as root: chmod"))
    assert found.verdict == "INCONCLUSIVE"
    assert "energy was not measured: RAPL may be read by root only; as root: chmod" in found.message
    late = with_energy(None, left_out=("no time for the energy, it takes 19 s",))
    assert "no time for the energy" in judged("joules@b8 > 1", late).message
    assert (
        "older"
        in judged("joules@b8 > 1", replace(late, settings={}, rows=bench_of_release(0, 4, batches=(8,)).rows)).message
    )


def test_throttled_energy_or_idle_power_decides_nothing() -> None:
    hot = judged("joules@b8 > dense * 0.8", with_energy(energy_of(PLANTED, gpu=HOT)))
    assert (hot.verdict, "throttled during almost all rounds (hw_slowdown)" in hot.message) == ("INCONCLUSIVE", True)
    resting = judged("joules@b8 > 1", with_energy(energy_of(PLANTED | {"reduced": -0.1})))
    assert (resting.verdict, "no more power than the idle" in resting.message) == ("INCONCLUSIVE", True)


def test_joules_are_compared_with_a_baseline_of_the_same_sensor() -> None:
    older = with_energy(energy_of(PLANTED | {"reduced": 1.4}))
    risen = judged("joules@b8 > baseline * 1.03", with_energy(energy_of(PLANTED)), older)
    assert risen.verdict == "FAIL"
    assert judged("joules@b8 > baseline * 1.2", with_energy(energy_of(PLANTED)), older).verdict == "PASS"
    other = judged("joules@b8 > baseline * 1.2", with_energy(energy_of(PLANTED), "RAPL of package-0, package-1"), older)
    assert (other.verdict, "energy: 'RAPL of package-0' then" in other.message) == ("NOT-COMPARABLE", True)
    machine = {name: joules * 1.1 for name, joules in PLANTED.items()}
    moved = judged("joules@b8 > baseline * 1.05", with_energy(energy_of(machine)), with_energy(energy_of(PLANTED)))
    assert (moved.verdict, "the machine itself moved" in moved.message) == ("INCONCLUSIVE", True)


@pytest.mark.parametrize(
    ("rule", "message"),
    [("joules > 1", "joules is measured at a batch size; write joules@b8"), ("end_to_end.joules@b8 > 1", "goes with")],
)
def test_rules_on_joules_name_a_batch_size_and_no_measure(rule: str, message: str) -> None:
    rejects(message, rule_from_text, rule)


def test_summary_of_energy_names_its_sensor_and_idle_power() -> None:
    found: EnergySummary = summarise_energy(energy_of(PLANTED, spread=0.0), NAMES)
    assert found.line == (
        "dense 2 (2 to 2) J/image, reduced 1.5 (1.5 to 1.5) J/image, reference over candidate 1.333 (1.333 to 1.333), "
        "reference against itself 1.000 (1.000 to 1.000), RAPL of package-0, idle power of 50.0 W subtracted"
    )


def test_gpu_energy_is_read_in_millijoules_or_absent() -> None:
    assert Gpu(FakeNvml(energy_mj=lambda: 5), 0, (1,)).energy_mj() == 5
    assert Gpu(FakeNvml(), 0, (1,)).energy_mj() is None
