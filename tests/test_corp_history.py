"""`gate --history`, `gate --init-baseline` and `bench compare`: their output, files, exit codes and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from perf.record.runs import save_bench
from tests.command import invoked, refuses, run
from tests.histories import bench_of_release
from tests.test_perf_report import bench

RISEN = [2.5] * 6 + [2.6]


def gate_releases(tmp_path: Path, levels: list[float]) -> Result:
    """Gate a release at each of these levels in turn, and return the result of the last."""
    for day, level in enumerate(levels):
        save_bench(bench_of_release(day, level, batches=(1, 4)), tmp_path / "bench.json")
        result = run("gate", tmp_path / "bench.json", "--history", tmp_path / "kept", "-o", tmp_path / "gate.json")
    return result


@pytest.mark.slow("measurement")
def test_every_release_is_stored_after_its_gate_and_a_rise_exits_1(tmp_path: Path) -> None:
    assert gate_releases(tmp_path, [2.5]).exit_code == 0
    result = gate_releases(tmp_path, RISEN)
    assert result.exit_code == 1, result.output
    assert len(list((tmp_path / "kept").iterdir())) == len(RISEN)
    gate = json.loads((tmp_path / "gate.json").read_text())
    assert [rule["verdict"] for rule in gate["rules"]] == ["FAIL", "FAIL"]
    assert [rule["metric"] for rule in gate["rules"]] == ["history", "history"]
    assert "<svg" in (tmp_path / "history.svg").read_text()
    again = invoked("gate", tmp_path / "bench.json", "--history", tmp_path / "kept", "--json", code=1)
    assert len(list((tmp_path / "kept").iterdir())) == len(RISEN)
    assert json.loads(again.stdout)["rules"] == gate["rules"]


@pytest.mark.slow("measurement")
def test_directory_report_shows_the_history(tmp_path: Path) -> None:
    gate_releases(tmp_path, RISEN)
    for suffix in (".html", ".md", ".csv"):
        invoked("report", tmp_path, "-o", tmp_path / f"report{suffix}")
    page = (tmp_path / "report.html").read_text()
    assert "Latency over releases" in page
    assert "Reduced p50 at batch 4" in page
    assert "+4." in (tmp_path / "report.md").read_text() or "+3.9" in (tmp_path / "report.md").read_text()
    figures = [line for line in (tmp_path / "report.csv").read_text().splitlines() if line.startswith("history,")]
    assert len(figures) == 2 * 3 * len(RISEN)


@pytest.mark.parametrize(
    ("kind", "entry", "message"),
    [
        ("history", '"releases": 3', "history.json: releases: got 3"),
        ("gate", '"rules": ["x"]', "gate.json: rules[0]: got 'x', expected a JSON object"),
        ("corp-deploy/effects", '"rows": {"preset": "none"}', "effects.json: rows: got an object, expected a list"),
    ],
)
def test_report_names_a_broken_file(kind: str, entry: str, message: str, tmp_path: Path) -> None:
    gate_releases(tmp_path, [2.5])
    broken = tmp_path / f"{kind.removeprefix('corp-deploy/')}.json"
    broken.write_text(f'{{"kind": "{kind}", "version": 1, {entry}}}')
    refuses(message, "report", tmp_path, "-o", tmp_path / "report.html")


def test_foreign_files_are_named_and_do_not_stop_the_gate(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "notes.txt").write_text("ours")
    (kept / "cut.json").write_text("{")
    result = gate_releases(tmp_path, [2.5])
    assert result.exit_code == 0
    assert "left out notes.txt" in result.output
    assert "left out cut.json" in result.output


def test_bad_calls_are_refused_in_one_message(tmp_path: Path) -> None:
    save_bench(bench_of_release(0, 2.5), tmp_path / "bench.json")
    (tmp_path / "parity.json").write_text('{"kind": "parity", "version": 1}')
    invoked("gate", tmp_path / "bench.json", "--history", tmp_path / "bench.json", code=2)
    refuses("give a bench.json", "gate", tmp_path / "parity.json", "--history", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_history_directory_stores_only_records(tmp_path: Path) -> None:
    save_bench(bench_of_release(0, 2.5), tmp_path / "bench.json")
    kept = tmp_path / "kept"
    words = ("gate", tmp_path / "bench.json", "--history", kept, "-o", kept / "gate.json")
    refuses("write verdict and trend elsewhere", *words)
    assert not kept.exists()


# `gate --init-baseline`


@pytest.fixture
def baseline_gate(tmp_path: Path) -> tuple[object, ...]:
    """Return the words of a gate command that starts a baseline."""
    save_bench(bench_of_release(0, 4.0, batches=(1,)), tmp_path / "bench.json")
    return ("gate", tmp_path / "bench.json", "--baseline", tmp_path / "base.json", "--init-baseline")


@pytest.mark.parametrize(
    ("rule", "verdict", "code"),
    [("p50@b1 > 0", "FAIL", 1), ("peak_memory_bytes@b1 > baseline", "INCONCLUSIVE", 3)],
)
def test_unwritten_baseline_is_reported_with_the_reason(
    baseline_gate: tuple[object, ...], rule: str, verdict: str, code: int, tmp_path: Path
) -> None:
    done = invoked(*baseline_gate, "--fail-if", rule, "--quiet", code=code)
    messages = " ".join(done.stderr.split())
    assert (
        f"warning: {tmp_path / 'base.json'}: baseline not written, because the gate is {verdict} ({rule}: " in messages
    )
    assert "the first record that passes becomes it: measure again, or correct the rule" in messages
    assert not (tmp_path / "base.json").exists()


def test_written_baseline_is_reported(baseline_gate: tuple[object, ...], tmp_path: Path) -> None:
    done = invoked(*baseline_gate, "--fail-if", "p50@b1 > baseline")
    assert "is the baseline now" in done.stderr
    assert "not written" not in done.stderr
    assert (tmp_path / "base.json").is_file()
    assert "not written" not in invoked(*baseline_gate, "--fail-if", "p50@b1 > baseline").stderr


def test_nothing_is_reported_without_the_option(baseline_gate: tuple[object, ...]) -> None:
    assert "not written" not in invoked(*baseline_gate[:2], "--fail-if", "p50@b1 > 0", code=1).stderr


# `bench compare`


def compare(folder: Path, path: tuple[str, str], value: object, *words: str) -> Result:
    """Compare a record with a copy of itself in which the entry at `path` is another value."""
    before, (table, key) = bench(), path
    changes: dict[str, Any] = {table: {**getattr(before, table), key: value}}
    files = [folder / f"{name}.json" for name in ("before", "after")]
    for file, record in zip(files, (before, replace(before, **changes)), strict=True):
        save_bench(record, file)
    return run("bench", "compare", *files, *words)


def test_comparable_differences_are_shown_and_exit_0(tmp_path: Path) -> None:
    result = compare(tmp_path, ("environment", "load_average"), 3.0)
    assert result.exit_code == 0, result.output
    assert "| load_average | None | 3.0 |" in result.stdout


@pytest.mark.parametrize(("path", "key"), [(("environment", "cpu"), "cpu"), (("settings", "streams"), "streams")])
def test_incomparable_differences_are_named_and_exit_5(tmp_path: Path, path: tuple[str, str], key: str) -> None:
    """The command shows the figures nevertheless."""
    result = compare(tmp_path, path, "another")
    assert result.exit_code == 5, result.output
    assert f"| {key} (decisive) |" in result.stdout
    assert "Not comparable" in result.stdout
    assert "| 8 | reduced |" in result.stdout
    record = json.loads(compare(tmp_path, path, "another", "--json").stdout)
    assert (record["comparable"], record["differences"][0]["key"]) == (False, key)
