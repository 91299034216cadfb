"""Energy and throttling in the views of a bench record."""

from dataclasses import replace

from corp_deploy.views.speed import speed_record, speed_table
from ground.records import json_from_record
from perf.record.runs import Bench
from perf.record.states import CpuState
from perf.report.render import csv_from_record, markdown_from_record
from tests.histories import bench_of_release
from tests.test_no_infinity import shown


def record_of(bench: Bench) -> dict[str, object]:
    return {"title": "digits", "bench": {"kind": "bench", "version": 1, **json_from_record(bench)}}


def test_throttled_row_is_marked_in_table_report_and_record() -> None:
    steady = bench_of_release(0, 4.0)
    cpu = CpuState(
        governor=None, clock_mhz=8, temperature_c=99, quota_cpus=1.0, paused_ms=1.0, throttle=("cpu_thermal",)
    )
    (row,) = steady.rows
    hot = replace(steady, rows=(replace(row, blocks=tuple(replace(each, cpu=cpu) for each in row.blocks)),))
    for bench, marked in ((steady, False), (hot, True)):
        assert ("throttled" in shown(speed_table(bench))) == marked
        assert ("throttled" in markdown_from_record(record_of(bench))) == marked
        assert ("throttled,cpu_thermal" in csv_from_record(record_of(bench))) == marked
        assert speed_record(bench)["rows"][0]["throttled"] == ["cpu_thermal"] * marked
