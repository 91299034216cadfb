"""`gate --history` from the command line: what it prints, writes, keeps and refuses; the recipe's key."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from corp_deploy.cli import main
from perf.record.runs import save_bench
from tests.command import invoked, refuses, run
from tests.histories import bench_of_release
from tests.test_perf_report import bench

RISEN = [2.5] * 6 + [2.6]


def gated(tmp_path: Path, levels: list[float]) -> Result:
    """The gate of the last of these releases, after that of each before it."""
    for day, level in enumerate(levels):
        save_bench(bench_of_release(day, level, batches=(1, 4)), tmp_path / "bench.json")
        result = run("gate", tmp_path / "bench.json", "--history", tmp_path / "kept", "-o", tmp_path / "gate.json")
    return result


@pytest.mark.slow("measurement")
def test_every_release_is_stored_after_its_gate_and_a_rise_exits_1(tmp_path: Path) -> None:
    assert gated(tmp_path, [2.5]).exit_code == 0
    result = gated(tmp_path, RISEN)
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
    gated(tmp_path, RISEN)
    for suffix in (".html", ".md", ".csv"):
        assert run("report", tmp_path, "-o", tmp_path / f"report{suffix}").exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "Latency over releases" in page
    assert "Median time by release, batch 4" in page
    assert "+4." in (tmp_path / "report.md").read_text() or "+3.9" in (tmp_path / "report.md").read_text()
    figures = [line for line in (tmp_path / "report.csv").read_text().splitlines() if line.startswith("history,")]
    assert len(figures) == 2 * 3 * len(RISEN)


def test_report_names_a_broken_history_file(tmp_path: Path) -> None:
    gated(tmp_path, RISEN[:2])
    (tmp_path / "history.json").write_text('{"kind": "history", "version": 1, "releases": 3}')
    refuses("history.json", "report", tmp_path, "-o", tmp_path / "report.html")


def test_foreign_files_are_named_and_do_not_stop_the_gate(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "notes.txt").write_text("ours")
    (kept / "cut.json").write_text("{")
    result = gated(tmp_path, [2.5])
    assert result.exit_code == 0
    assert "left out notes.txt" in result.output
    assert "left out cut.json" in result.output


def test_bad_calls_are_refused_in_one_message(tmp_path: Path) -> None:
    save_bench(bench_of_release(0, 2.5), tmp_path / "bench.json")
    (tmp_path / "parity.json").write_text('{"kind": "parity", "version": 1}')
    invoked("gate", tmp_path / "bench.json", "--history", tmp_path / "bench.json", code=2)
    result = run("gate", tmp_path / "parity.json", "--history", tmp_path / "kept")
    assert (result.exit_code, "give a bench.json" in result.output) == (2, True)
    assert not (tmp_path / "kept").exists()


def test_history_directory_stores_only_records(tmp_path: Path) -> None:
    save_bench(bench_of_release(0, 2.5), tmp_path / "bench.json")
    kept = tmp_path / "kept"
    result = run("gate", tmp_path / "bench.json", "--history", kept, "-o", kept / "gate.json")
    assert (result.exit_code, kept.exists()) == (2, False)
    assert "write verdict and trend elsewhere" in " ".join(result.output.split())


# `compare` puts two records side by side, and its exit code says whether they may be.

Change = tuple[str, ...]


def compared(folder: Path, path: Change = (), value: object = None, *words: str) -> Result:
    """A record beside itself, with `value` put where `path` leads in the second."""
    before = bench()
    after: dict[str, Any] = copy.deepcopy(before)
    place: Any = after
    for key in path[:-1]:
        place = place[key]
    if path:
        place[path[-1]] = value
    for name, record in (("before", before), ("after", after)):
        (folder / f"{name}.json").write_text(json.dumps(record))
    files = [str(folder / f"{name}.json") for name in ("before", "after")]
    return CliRunner().invoke(main, ["bench", "compare", *files, *words])


def test_comparable_differences_are_shown_and_exit_0(tmp_path: Path) -> None:
    result = compared(tmp_path, ("environment", "load_average"), 3.0)
    assert result.exit_code == 0, result.output
    assert "| load_average | None | 3.0 |" in result.stdout


@pytest.mark.parametrize(("path", "key"), [(("environment", "cpu"), "cpu"), (("settings", "streams"), "streams")])
def test_incomparable_differences_are_named_and_exit_5(tmp_path: Path, path: Change, key: str) -> None:
    """The figures are shown all the same."""
    result = compared(tmp_path, path, "another")
    assert result.exit_code == 5, result.output
    assert f"| {key} (decisive) |" in result.stdout
    assert "Not comparable" in result.stdout
    assert "| 8 | reduced |" in result.stdout
    record = json.loads(compared(tmp_path, path, "another", "--json").stdout)
    assert (record["comparable"], record["differences"][0]["key"]) == (False, key)
