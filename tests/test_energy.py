"""Energy and throttling in the views of a bench record."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser as prometheus
from prometheus_client.openmetrics import parser as openmetrics

from corp_deploy import machine
from corp_deploy.formats.bencher import bmf_from_figures
from corp_deploy.formats.figures import BIGGER_IS_BETTER, figures_of
from corp_deploy.formats.openmetrics import openmetrics_from_records
from corp_deploy.invocation.running import BenchOptions, RunOptions
from corp_deploy.invocation.table import BENCH_OF
from corp_deploy.proof import speed
from corp_deploy.release.card import speed_lines
from corp_deploy.views.speed import energy_lines, speed_record, speed_table
from ground.errors import BadInput
from perf.bench.energy import EnergyMeter
from perf.gate.evidence import Evidence
from perf.gate.gate import Gate, JudgedRule
from perf.record.runs import Bench, save_bench
from perf.record.states import CpuState
from perf.report.content import Content
from perf.report.page import html_from_content
from perf.report.render import csv_from_content, markdown_from_content
from perf.stats.summary import summarise
from perf.timing.energy import NoSensor, Rapl
from perf.timing.watch import unwatched
from tests.doubles import some
from tests.histories import bench_of_release
from tests.nvml import FakeNvml
from tests.powered import energy_of
from tests.test_no_infinity import shown


def content_of(bench: Bench) -> Content:
    return Content(title="digits", bench=bench)


def test_throttled_row_is_marked_in_table_report_and_record() -> None:
    steady = bench_of_release(0, 4.0)
    cpu = CpuState(
        governor=None, clock_mhz=8, temperature_c=99, quota_cpus=1.0, paused_ms=1.0, throttle=("cpu_thermal",)
    )
    (row,) = steady.rows
    hot = replace(steady, rows=(replace(row, blocks=tuple(replace(each, cpu=cpu) for each in row.blocks)),))
    for bench, marked in ((steady, False), (hot, True)):
        assert ("throttled" in shown(speed_table(bench))) == marked
        assert ("throttled" in markdown_from_content(content_of(bench))) == marked
        assert ("throttled,cpu_thermal" in csv_from_content(content_of(bench))) == marked
        assert speed_record(bench)["rows"][0]["throttled"] == ["cpu_thermal"] * marked


ENERGY = energy_of({"dense": 2.0, "dense again": 2.0, "reduced": 1.5}, spread=0.0)


def with_energy(bench: Bench) -> Bench:
    return replace(bench, rows=tuple(replace(row, energy=ENERGY) for row in bench.rows))


def test_energy_is_shown_where_it_was_measured_and_no_column_elsewhere() -> None:
    without = bench_of_release(0, 4.0)
    measured = with_energy(without)
    table, report, csv = (
        shown(speed_table(measured)),
        markdown_from_content(content_of(measured)),
        csv_from_content(content_of(measured)),
    )
    for column in ("dense J/img", "reduced J/img", "│ 2           │ 1.5"):
        assert column in table
    assert "| Joules/image |" in report
    assert "2.00 → 1.50" in report
    assert "By RAPL of package-0. The power of the idle machine" in report
    assert "| 1 | 2.00 → 1.50 | 1.33 · 1.33 to 1.33 | 1.00 · 1.00 to 1.00 | 50.0 | 8 |" in report
    for line in ("energy,reduced,1,,joules_per_image,1.5,1.5,1.5", "energy,machine,1,,idle_w,50.0,,"):
        assert line in csv.splitlines()
    assert "Joules/image" in html_from_content(content_of(measured))
    assert energy_lines(measured) == [f"batch 1, energy: {some(summarise(measured).rows[0].energy).line}"]
    assert speed_record(measured)["rows"][0]["energy"] == {
        "sensor": "RAPL of package-0",
        "joules_per_image": {"dense": [2.0, 2.0, 2.0], "reduced": [1.5, 1.5, 1.5]},
        "ratio": [pytest.approx(4 / 3)] * 3,
        "noise": [1.0, 1.0, 1.0],
        "idle_w": 50.0,
    }
    for text in (
        shown(speed_table(without)),
        markdown_from_content(content_of(without)),
        csv_from_content(content_of(without)),
    ):
        assert not re.search(r"joules|J/img|idle", text, re.IGNORECASE)
    assert energy_lines(without) == []
    assert speed_record(without)["rows"][0]["energy"] is None


def test_card_has_joules_beside_latency(tmp_path: Path) -> None:
    save_bench(with_energy(bench_of_release(0, 4.0)), tmp_path / "bench.json")
    lines = [*speed_lines(tmp_path / "bench.json")]
    assert "| speed-up (95 % interval) | dense J/image | reduced J/image |" in "\n".join(lines)
    assert next(line for line in lines if line.startswith("| 1 |")).endswith("| 2 (2 to 2) | 1.5 (1.5 to 1.5) |")
    assert lines[-1].endswith("RAPL of package-0, idle power of 50.0 W subtracted.")
    save_bench(bench_of_release(0, 4.0), tmp_path / "bench.json")
    assert "J/image" not in "\n".join(speed_lines(tmp_path / "bench.json"))


def test_openmetrics_has_energy_and_idle_power(tmp_path: Path) -> None:
    gate = Gate(rules=(JudgedRule(rule="r", verdict="PASS", message="", metric="joules"),))
    text = openmetrics_from_records(Evidence(bench=with_energy(bench_of_release(0, 4.0))), gate, tmp_path)
    for reader in (openmetrics, prometheus):
        families = {each.name: each for each in reader.text_string_to_metric_families(text)}
        (joules,) = families["corp_deploy_promised_energy_per_image_joules"].samples
        (watts,) = families["corp_deploy_idle_power_watts"].samples
        assert (joules.value, watts.value) == (1.5, 50.0)
        assert joules.labels["batch"] == watts.labels["batch"] == "1"
    silent = openmetrics_from_records(Evidence(bench=bench_of_release(0, 4.0)), gate, tmp_path)
    assert "joules" not in silent
    assert "watts" not in silent


def test_tracked_energy_is_smaller_if_better() -> None:
    found = [each for each in figures_of(Evidence(bench=with_energy(bench_of_release(0, 4.0)))) if each.unit == "J"]
    assert [(each.subject, each.measure, each.value, each.batch) for each in found] == [
        ("dense", "joules per image", 2.0, 1),
        ("reduced", "joules per image", 1.5, 1),
    ]
    assert "joules per image" not in BIGGER_IS_BETTER
    assert json.loads(bmf_from_figures(found))["reduced at batch 1"]["joules-per-image"]["value"] == 1.5


@pytest.mark.parametrize(
    ("nvml", "rapl", "expected"),
    [
        (
            None,
            NoSensor("RAPL may be read by root only", "chmod"),
            [("energy of CPUs", "", "RAPL may be read", "chmod")],
        ),
        (None, Rapl("RAPL of package-0", {}), [("energy of CPUs", "RAPL of package-0, updated every 1 ms", "", "")]),
        (
            FakeNvml(energy_mj=lambda: 5),
            NoSensor("no RAPL here", "measure elsewhere"),
            [
                ("energy of CPUs", "", "joules per image in bench: no RAPL here", "measure elsewhere"),
                ("energy of the GPU", "NVML of A Card, updated every 100 ms", "", ""),
            ],
        ),
    ],
)
def test_doctor_says_which_sensor_exists(
    nvml: FakeNvml | None, rapl: Rapl | NoSensor, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perf.timing.gpu.open_nvml", lambda: nvml)
    monkeypatch.setattr(machine, "find_rapl", lambda: rapl)
    found = [each for each in machine.find_capabilities() if each.what.startswith("energy")]
    assert len(found) == len(expected)
    for each, (what, has, disables, remedy) in zip(found, expected, strict=True):
        assert (each.what, each.found, each.remedy) == (what, has, remedy)
        assert disables in each.disables


@pytest.mark.parametrize(
    ("given", "limit_s"),
    [({}, 60.0), ({"time_limit": 3.0}, 9.0), ({"time_limit": 90.0}, 60.0), ({"energy_time": 0.0}, 0.0),
     ({"energy_time": 120.0, "time_limit": 1.0}, 120.0)],
)  # fmt: skip
def test_energy_takes_a_bounded_time_unless_another_is_asked_for(given: dict[str, Any], limit_s: float) -> None:
    assert BenchOptions(**given).energy_limit_s == limit_s


def test_decoders_refuse_the_time_for_energy() -> None:
    with pytest.raises(BadInput, match="--energy-time"):
        BENCH_OF.refuse([("", "decoders")], {"energy_time": 5.0})


@pytest.mark.parametrize(
    ("energy_s", "flush", "reason"), [(0.0, False, "was not asked for"), (9.0, True, "a flush of the L2 cache")]
)
def test_energy_that_was_not_asked_for_or_is_spoilt_is_not_measured(energy_s: float, flush: bool, reason: str) -> None:
    running = RunOptions(backend="torch", device="cuda", flush_l2=flush)
    with speed._open_meter("cuda", None, energy_s, unwatched, running) as meter:
        assert isinstance(meter, NoSensor)
        assert reason in meter.reason


def test_sensor_of_the_device_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.timing.energy.find_rapl", lambda: Rapl("RAPL of package-0", {}))
    with speed._open_meter("cpu", None, 9.0, unwatched, RunOptions()) as meter:
        assert isinstance(meter, EnergyMeter)
        assert (meter.sensor.name, meter.limit_s) == ("RAPL of package-0", 9.0)
