"""What has no interval, or was not measured at all, in everything that shows a measurement: no infinity is printed."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from corp_deploy.formats.bencher import bmf_from_figures
from corp_deploy.formats.figures import figures_of
from corp_deploy.formats.openmetrics import openmetrics_from_records
from corp_deploy.formats.tracking import tracked_from_figures
from corp_deploy.planning.sweep_points import DensePoint, SweepPoint, speed_from_row
from corp_deploy.proof.compatibility import compare_latencies
from corp_deploy.proof.gate import comparison_as_json
from corp_deploy.views.decoders import decode_table, decoder_record, prefill_table
from corp_deploy.views.speed import best_batch, repeat_lines, speed_record, speed_table
from corp_deploy.views.sweep import csv_of_sweep, sweep_speeds
from corp_deploy.views.sweep_page import sweep_page
from ground.records import json_from_record, record_from_text
from perf.gate.evidence import Evidence
from perf.gate.gate import Gate, judge
from perf.gate.rule import rule_from_text
from perf.gate.verdicts import junit_from_gate, markdown_from_gate
from perf.record.decoders import DecoderBench, KvCache, Prefill
from perf.record.runs import OUT_OF_TIME, Bench, BenchTrial, Row
from perf.report import render
from perf.report.content import Content, GateLine, GateLines
from perf.report.page import html_from_content
from perf.stats.compare import compare_records, markdown_from_comparison
from perf.stats.summary import ONE, VARIED, summarise
from tests.test_corp_sweep_trials import point
from tests.test_perf_gate import bench_of, noisy, row_of

INFINITY = re.compile(r"\b(inf|infinity|nan)\b", re.IGNORECASE)
WHY = "it takes about 14 s, the limit is 3 s; give --time-limit 14"


def three_rounds(batch: int) -> Row:
    few = row_of(batch, {"dense": noisy(10.0, rounds=3), "reduced": noisy(8.0, rounds=3, seed=1)})
    noise = row_of(batch, {"dense": noisy(10.0, rounds=3), "dense again": noisy(10.0, rounds=3, seed=2)})
    repeats = row_of(batch, {ONE: noisy(8.0, rounds=3), VARIED: noisy(8.0, rounds=3, seed=3)})
    return replace(few, noise_blocks=noise.blocks, repeat_blocks={"reduced": repeats.blocks}, stop="time limit")


def unmeasured(batch: int) -> Row:
    late = BenchTrial(status=OUT_OF_TIME, message=WHY)
    return replace(row_of(batch, {}), trials={"dense": late, "reduced": late}, stop=OUT_OF_TIME)


@cache
def record() -> Bench:
    return bench_of(three_rounds(1), unmeasured(8))


@cache
def decoders() -> DecoderBench:
    prefill = tuple(
        Prefill(length=length, bench=bench_of(row)) for length, row in ((16, three_rounds(1)), (64, unmeasured(1)))
    )
    caches = dict.fromkeys(("dense", "reduced"), KvCache(layers=1, groups=1, head=8))
    return DecoderBench(created="", command=(), caches=caches, prefill=prefill, cached=16, decode=record(), warnings=())


def swept() -> list[SweepPoint]:
    rows = summarise(record()).rows
    return [replace(point(1.2, 0.9), speeds=tuple(speed_from_row(row, "dense", "reduced") for row in rows))]


@cache
def judged() -> Gate:
    rules = ["speedup@b1 < 1.2", "p50@b1 > dense", "p50@b1 > baseline * 1.03", "speedup@b8 < 1.2", "p99@b8 > 1"]
    now = Evidence(bench=record())
    return judge([rule_from_text(rule) for rule in rules], now, now)


def reported() -> Content:
    rules = (GateLine(rule=each.rule, verdict=each.verdict, message=each.message) for each in judged().rules)
    return Content(title="t", bench=record(), gate=GateLines(verdict=judged().verdict, rules=tuple(rules)))


def shown(*items: Any) -> str:
    console = Console(file=io.StringIO(), width=400)
    for item in items:
        console.print(item)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


EVERY: dict[str, Callable[[], str]] = {
    "bench": lambda: shown(speed_table(record()), *repeat_lines(record()), *best_batch(record())),
    "bench --json": lambda: json.dumps(speed_record(record()), allow_nan=False),
    "decoders": lambda: shown(prefill_table(decoders()), decode_table(decoders())),
    "decoders --json": lambda: json.dumps(decoder_record(decoders()), allow_nan=False),
    "sweep": lambda: shown(sweep_speeds(swept())), "sweep.csv": lambda: csv_of_sweep(swept()),
    "sweep.html": lambda: sweep_page(swept(), DensePoint(macs=20, parameters=2, inputs=4), title="t"),
    "gate.json": lambda: json.dumps(asdict(judged()), allow_nan=False),
    "gate.md": lambda: markdown_from_gate(judged()), "gate.xml": lambda: junit_from_gate(judged()),
    "compare": lambda: markdown_from_comparison(compare_records(record(), record())),
    "compare --json": lambda: json.dumps(comparison_as_json(compare_records(record(), record())), allow_nan=False),
    "report.html": lambda: html_from_content(reported()),
    "report.md": lambda: render.markdown_from_content(reported()),
    "report.csv": lambda: render.csv_from_content(reported()),
    "report.xml": lambda: render.junit_from_content(reported()),
    "tracking": lambda: tracked_from_figures(figures_of(Evidence(bench=record()))),
    "bencher.json": lambda: bmf_from_figures(figures_of(Evidence(bench=record()))),
    "metrics": lambda: openmetrics_from_records(Evidence(bench=record()), judged(), Path()),
    "engine record": lambda: json.dumps(json_from_record(compare_latencies(record(), "8.6")), allow_nan=False),
}  # fmt: skip


@pytest.mark.parametrize("what", EVERY)
def test_no_infinity_is_printed(what: str) -> None:
    text = EVERY[what]()
    visible = re.sub(r"<(style|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not INFINITY.search(visible), INFINITY.search(visible)


@pytest.mark.parametrize("what", ["bench", "decoders", "report.html", "report.md", "report.csv"])
def test_unmeasured_rows_are_named(what: str) -> None:
    assert "out of time" in EVERY[what]()


@pytest.mark.parametrize("what", ["bench --json", "decoders --json", "sweep", "gate.md", "report.md"])
def test_needed_time_is_shown(what: str) -> None:
    assert WHY in EVERY[what]()


@pytest.mark.parametrize("what", ["bench", "decoders", "sweep", "gate.md", "compare", "report.html", "report.md"])
def test_value_from_too_few_rounds_has_no_interval(what: str) -> None:
    assert "(no interval)" in EVERY[what]()


def test_sweep_trial_records_a_missing_interval() -> None:
    (kept,) = swept()
    assert record_from_text(json.dumps(json_from_record(kept)), SweepPoint, where="here") == kept
