"""Histories of bench records: which records are stored and compared, and which changes fail."""

import json
import math
import re
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf.gate.history import change_text, judge_history, load_trend, save_trend, standing_rise
from perf.record.runs import Bench, save_bench
from perf.report.history import draw_history, history_table
from perf.report.past_plots import draw_over_releases
from perf.stats.changes import (
    ALPHA,
    LEAST_NOISE,
    LEAST_VALUES,
    LOOKS,
    TAIL,
    ChangePoint,
    change_points,
    critical_score,
    normal_from_t,
)
from perf.stats.releases import BESIDE, History, Release, add_release, load_history, release_of_file
from perf.stats.stats import Interval
from perf.stats.trend import Series, Trend, build_trend
from tests.histories import SAME, bench_of_release
from tests.refusals import rejects


def _add(directory: Path, records: list[Path]) -> None:
    for record in records:
        add_release(directory, record)


def release(bench: Bench) -> Release:
    return Release(name=f"{bench.created}-x", bench=bench)


def trend(*benches: Bench) -> Trend:
    return build_trend(History(releases=tuple(release(bench) for bench in benches[:-1])), release(benches[-1]))


def steps(*levels: float, machine: float = 0.0, sha256: str | None = SAME) -> Trend:
    """Build the trend of one release per level, with a machine that is slower by `machine` in every second one."""
    slowed = (1 + machine * (day % 2) for day in range(len(levels)))
    days = zip(range(len(levels)), levels, slowed, strict=True)
    return trend(*(bench_of_release(day, level, machine=slow, sha256=sha256) for day, level, slow in days))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return the file of a bench record beside the history."""
    save_bench(bench_of_release(0, 2.5), tmp_path / "bench.json")
    return tmp_path / "bench.json"


def test_record_is_stored_once_under_its_time_and_digest(tmp_path: Path) -> None:
    history = tmp_path / "made" / "history"
    record, other = tmp_path / "bench.json", tmp_path / "other.json"
    save_bench(bench_of_release(1, 2.5), record)
    save_bench(bench_of_release(0, 2.5), other)
    assert [add_release(history, path) for path in (record, record, other)] == [True, False, True]
    names = sorted(path.name for path in history.iterdir())
    assert [name[:17] for name in names] == ["20260301T100000Z-", "20260302T100000Z-"]
    assert (history / names[1]).read_bytes() == record.read_bytes()
    loaded = load_history(history)
    assert [each.bench.created[:10] for each in loaded.releases] == ["2026-03-01", "2026-03-02"]
    assert loaded.left_out == ()


def test_files_of_the_same_release_are_kept_beside_its_record(tmp_path: Path, record: Path) -> None:
    history, parity = tmp_path / "history", tmp_path / "parity.engine.json"
    assert add_release(history, record)
    parity.write_text("engine")
    for name in ("parity.json", "recipe.toml", "manifest.json", "gate.json"):
        (tmp_path / name).write_text(name)
    assert not add_release(history, record, parity), "files that are missing join a record that was kept without them"
    assert len(list(history.iterdir())) == 4
    loaded = load_history(history)
    (kept,) = loaded.releases
    assert loaded.left_out == ()
    texts = [path.read_text() for kind in BESIDE if (path := kept.beside(kind))]
    assert texts == ["engine", "recipe.toml", "manifest.json"]


def test_folder_with_a_record_is_a_release(tmp_path: Path, record: Path) -> None:
    history = tmp_path / "releases"
    for name in ("1.0", "notes"):
        (history / name).mkdir(parents=True)
    (history / "1.0" / "bench.json").write_bytes(record.read_bytes())
    (history / "1.0" / "parity.json").write_text("{}")
    loaded = load_history(history)
    (found,) = loaded.releases
    assert found.beside("parity.json") == history / "1.0" / "parity.json"
    assert found.beside("recipe.toml") is None
    assert [each.name for each in loaded.left_out] == ["notes"]


def test_stored_record_is_never_overwritten(tmp_path: Path, record: Path) -> None:
    history = tmp_path / "history"
    add_release(history, record)
    kept = next(history.iterdir())
    kept.write_text("{}")
    assert not add_release(history, record)
    assert kept.read_text() == "{}"


def test_reformatted_record_counts_as_the_same_release(tmp_path: Path, record: Path) -> None:
    again, history = tmp_path / "again.json", tmp_path / "history"
    again.write_text(json.dumps(json.loads(record.read_text())))
    add_release(history, record)
    add_release(history, again)
    newest = release_of_file(record)
    assert build_trend(load_history(history), newest).releases == (newest.name,)


def test_foreign_files_are_named_and_left_alone(tmp_path: Path, record: Path) -> None:
    history = tmp_path / "history"
    add_release(history, record)
    kept = next(history.iterdir())
    (history / kept.name.replace("2026", "2025")).write_bytes(kept.read_bytes())
    (history / "README.md").write_text("ours")
    (history / "cut.json").write_text('{"kind": "bench", "ver')
    (history / "other.json").write_text('{"kind": "parity", "version": 1}')
    (history / "folder.json").mkdir()
    (history / ".half").write_text("{")
    loaded = load_history(history)
    assert len(loaded.releases) == 1
    reasons = {each.name[:6]: each.reason for each in loaded.left_out}
    assert set(reasons) == {"202503", "README", "cut.js", "other.", "folder"}
    assert "changed after it was kept" in reasons["202503"]
    assert "not JSON" in reasons["cut.js"]
    assert "expected a bench record" in reasons["other."]


def test_record_without_time_and_file_as_directory_are_refused(tmp_path: Path, record: Path) -> None:
    values = json.loads(record.read_text())
    (tmp_path / "timeless.json").write_text(json.dumps({**values, "created": "soon"}))
    rejects("created 'soon'; expected a time", release_of_file, tmp_path / "timeless.json")
    for directory in (record, record / "below"):
        rejects("a file, expected the directory", add_release, directory, record)


def test_records_of_other_machines_and_later_records_are_skipped_by_name() -> None:
    here, there = {"cpu": "one", "gpu": None}, {"cpu": "two", "gpu": None}
    days = [bench_of_release(day, 2.5, environment=there if day == 1 else here) for day in range(5)]
    history = History(releases=tuple(release(bench) for bench in days))
    found = build_trend(history, release(days[3]))
    assert [name[:10] for name in found.releases] == ["2026-03-01", "2026-03-03", "2026-03-04"]
    reasons = {each.name[:10]: each.reason for each in found.left_out}
    assert reasons["2026-03-02"] == "measured differently: cpu"
    assert "measured after" in reasons["2026-03-05"]


def test_rise_fails_until_it_is_fixed() -> None:
    (risen,) = judge_history(steps(*[2.5] * 7, 2.575, machine=0.05))
    assert risen.verdict == "FAIL"
    assert risen.value == pytest.approx(1.03, abs=0.006)
    assert "rose 3" in risen.message or "rose 2.9" in risen.message
    assert "release 8 of 8" in risen.message
    later = ([2.575] * 3, [2.575, 2.5], [2.575] * 6)
    (again,), (mended,), (old,) = (judge_history(steps(*[2.5] * 7, *levels)) for levels in later)
    assert (again.verdict, mended.verdict, old.verdict) == ("FAIL", "PASS", "PASS")
    assert "rose" in old.message


def exactly(*levels: float) -> tuple[Interval, ...]:
    return tuple(Interval(value=level, low=level, high=level) for level in levels)


def test_rise_stands_while_the_newest_record_is_nearer_to_it_than_to_the_previous_level() -> None:
    def rise_stands(newest: float) -> bool:
        rises = ((6, 1.04), (10, 1.02))
        changes = tuple(ChangePoint(first=at, found=at, ratio=exactly(ratio)[0], score=9.0) for at, ratio in rises)
        values = exactly(*[1.0] * 6, *[1.04] * 4, 1.06, newest)
        return standing_rise(Series(name="p50", unit="ms", values=values, judged=True, changes=changes)) is not None

    assert [rise_stands(newest) for newest in (1.055, 1.047, 1.04)] == [True, False, False]


def test_significance_is_corrected_for_the_number_of_batch_sizes() -> None:
    def critical(*batches: int) -> float:
        found = trend(*(bench_of_release(day, 2.5, batches=batches) for day in range(2)))
        return float(found.test.split("a score from ")[1].split()[0])

    one, three = critical(1), critical(1, 2, 4)
    assert one == pytest.approx(critical_score(ALPHA), abs=0.005)
    assert three == pytest.approx(critical_score(ALPHA / 3), abs=0.005)
    assert three > one


def test_uncertain_figures_are_not_separated() -> None:
    def alike(spread: float) -> Trend:
        levels = [2.5] * 8 + [2.54] * 3
        benches = (bench_of_release(day, level, spread=spread, seed=1) for day, level in enumerate(levels))
        return trend(*benches)

    assert alike(0.005).batches[0].judged.changes
    assert not alike(0.1).batches[0].judged.changes, "each figure is uncertain by more than the step"


def test_overlapping_calls_report_only_the_ratio() -> None:
    def overlapping(bench: Bench) -> Bench:
        rows = (
            replace(row, blocks=tuple(replace(block, compute_ms=(), lost_ms=None) for block in row.blocks))
            for row in bench.rows
        )
        return replace(bench, rows=tuple(rows))

    (batch,) = trend(*(overlapping(bench_of_release(day, 2.5)) for day in range(5))).batches
    dense, reduced, ratio = batch.series
    assert (dense.values, reduced.values) == ((None,) * 5, (None,) * 5)
    assert ratio.values[0] is not None
    assert ratio.values[0].value == pytest.approx(2.0, rel=0.01)


def test_fall_small_rise_and_no_change_pass() -> None:
    assert judge_history(steps(*[2.5] * 7, 2.4, 2.4))[0].verdict == "PASS"
    small = steps(*[2.5] * 12, *[2.5 * 1.007] * 4)
    assert standing_rise(small.batches[0].judged) is None
    assert small.batches[0].judged.changes
    assert "no change in 8 releases" in judge_history(steps(*[2.5] * 8))[0].message


def test_change_of_the_reference_too_is_attributed_to_the_machine() -> None:
    for sha256, name, verdict in ((SAME, "speed-up", "PASS"), (None, "reduced p50", "FAIL")):
        machines = enumerate([1.0] * 8 + [1.1] * 3)
        found = trend(*(bench_of_release(day, 2.5, machine=slow, sha256=sha256) for day, slow in machines))
        assert (found.batches[0].judged.name, judge_history(found)[0].verdict) == (name, verdict)


def test_few_releases_are_not_judged_and_a_disturbed_release_is_inconclusive() -> None:
    assert judge_history(steps(2.5, 2.6))[0].verdict == "UNJUDGED"
    days = [bench_of_release(day, 2.5, lost=0.5 if day in (3, 7) else 0.0) for day in range(8)]
    assert judge_history(trend(*days))[0].verdict == "INCONCLUSIVE"
    assert "other programs" in judge_history(trend(*days))[0].message
    earlier = trend(*days[:7])
    assert earlier.batches[0].judged.values[3] is None
    assert judge_history(earlier)[0].verdict == "PASS"


def test_trend_round_trips_and_is_drawn(tmp_path: Path) -> None:
    found = steps(*[2.5] * 7, 2.575, machine=0.03)
    save_trend(found, tmp_path / "history.json")
    assert load_trend(tmp_path / "history.json") == found
    drawing = draw_history(found)
    assert drawing.title == "Speed-up at batch 1"
    assert drawing.standalone.count("<circle") == 8 + 1
    table = history_table(found)
    assert len(table.rows) == 8
    assert [row[-1] for row in table.rows][:7] == [""] * 7
    change = found.batches[0].judged.changes[0]
    assert table.rows[7][-1] == f"{100 * (change.ratio.value - 1):+.1f} %"
    assert change_text(found, change) in judge_history(found)[0].message


# Change points equal an explicit search over all splits and keep the promised error rates on simulated histories.

stats: Any = pytest.importorskip("scipy.stats")


def test_spread_after_a_change_is_pooled_over_all_levels() -> None:
    rng = np.random.default_rng(3)
    logs = 0.01 * rng.standard_normal(16) + np.repeat([0.0, 0.2, 0.0], [8, 6, 2])
    points = change_points(np.exp(logs), 4.0)
    assert [(point.first, point.is_rise) for point in points] == [(8, True), (14, False)]
    last = points[1]
    groups = [logs[:8], logs[8:14], logs[14 : last.found + 1]]
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    freedom = sum(len(group) for group in groups) - 3
    error = math.sqrt(within / freedom * (1 / 6 + 1 / len(groups[2])))
    step = float(groups[2].mean() - groups[1].mean())
    assert last.score == pytest.approx(normal_from_t(step / error, freedom), rel=1e-9)
    assert last.ratio.low == pytest.approx(math.exp(step - 1.96 * error), rel=1e-9)


def by_hand(values: np.ndarray, critical: float, noise: float) -> list[tuple[int, int, float, float]]:
    """Return first, found, ratio and score of every change, computing each look and split anew."""
    logs, start, closed = np.log(values), 0, list[np.ndarray]()
    points: list[tuple[int, int, float, float]] = []
    for count in range(LEAST_VALUES, len(logs) + 1):
        skipped = max(start, count - LOOKS)
        window, best = logs[skipped:count], (0, 0.0, 0.0)
        for at in range(1, len(window)):
            groups = [*closed, window[:at], window[at:]]
            freedom = sum(len(group) - 1 for group in groups)
            within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
            error = math.sqrt(max(within / freedom, noise**2) * (1 / at + 1 / (len(window) - at))) if freedom else 0
            step = float(window[at:].mean() - window[:at].mean())
            if error and abs(step / error) > abs(best[1]):
                best = at, step / error, math.exp(step)
        freedom = sum(len(group) - 1 for group in closed) + len(window) - 2
        if best[0] and abs(normal_from_t(best[1], freedom)) >= critical:
            first = skipped + best[0]
            points.append((first, count - 1, best[2], normal_from_t(best[1], freedom)))
            closed.append(logs[start:first])
            start = first
    return points


@pytest.mark.parametrize("seed", range(4))
def test_change_points_of_a_long_series_equal_an_explicit_computation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    levels = np.cumsum(rng.choice([0.0, -0.012, 0.012], size=4))
    values = np.exp(0.006 * rng.standard_normal(72) + np.repeat(levels, [36, 12, 14, 10]))
    points = change_points(values, 3.0, noise=0.004)
    expected = by_hand(values, 3.0, 0.004)
    assert [(point.first, point.found) for point in points] == [(first, found) for first, found, *_ in expected]
    assert [point.ratio.value for point in points] == pytest.approx([ratio for *_, ratio, _ in expected], rel=1e-9)
    assert [point.score for point in points] == pytest.approx([score for *_, score in expected], rel=1e-9)


@pytest.mark.parametrize("freedom", [3, 8, 28])
@pytest.mark.parametrize("t", [1.0, 3.0, 6.0, -4.0])
def test_score_is_the_normal_deviate_with_the_p_value_of_t(t: float, freedom: int) -> None:
    exact = math.copysign(float(stats.norm.isf(stats.t.sf(abs(t), freedom))), t)
    assert normal_from_t(t, freedom) == pytest.approx(exact, rel=0.02)


def test_constant_and_short_series_have_no_change() -> None:
    tiny = [1.0] * 10 + [1 + LEAST_NOISE / 2] * 10
    for values in ([2.0] * 40, [], [1.0, 1.0, 9.0, 9.0], tiny):
        assert change_points(values, 4.0) == ()
    assert [point.first for point in change_points(tiny, 4.0, noise=1e-5)] == [10]


def test_critical_score_has_the_stated_false_alarm_rate() -> None:
    critical = critical_score(0.04)
    assert critical < critical_score(0.02) < critical_score(0.01)
    rng = np.random.default_rng(77)
    histories = np.exp(0.01 * rng.standard_t(TAIL, size=(500, LOOKS)))
    alarms = sum(bool(change_points(history, critical, noise=0.0)) for history in histories)
    low, high = stats.binom.interval(0.999, 500, 0.04)
    assert low <= alarms <= high


def test_rise_of_three_percent_is_found_within_two_releases_with_few_false_alarms() -> None:
    rng, critical = np.random.default_rng(2), critical_score()
    false_alarms, found = 0, 0
    for _ in range(60):
        false_alarms += bool(change_points(np.exp(0.002 * rng.standard_normal(LOOKS)), critical))
        at = int(rng.integers(LEAST_VALUES, LOOKS - 2))
        noise, rise = 0.002 * rng.standard_normal(LOOKS), np.where(np.arange(LOOKS) >= at, math.log(1.03), 0)
        points = change_points(np.exp(noise + rise), critical)
        found += any(point.is_rise and abs(point.first - at) <= 2 and at <= point.found <= at + 2 for point in points)
    assert false_alarms < 60 / 20
    assert found == 60


def test_concurrent_processes_lose_no_record(tmp_path: Path) -> None:
    records = [tmp_path / f"{day}.json" for day in range(12)]
    for day, record in enumerate(records):
        save_bench(bench_of_release(day, 2.5), record)
    context, history = get_context("fork"), tmp_path / "history"
    processes = [context.Process(target=_add, args=(history, part)) for part in (records[:8], records[4:])]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(load_history(history).releases) == 12
    assert len(list(history.iterdir())) == 12


def test_axis_shows_noise_small() -> None:
    series = Series(name="s", unit="ms", values=exactly(1.0, 1.001))
    drawing = draw_over_releases(series, [], ["v1", "v2"], batch=1, tone="dense")
    _, low, high = (float(y) for y in re.findall(r'cy="([^"]*)"', "".join(drawing.marks)))
    assert 0 < low - high < 10


def test_change_without_figures_around_it_is_refused() -> None:
    point = ChangePoint(first=1, found=1, ratio=exactly(1.1)[0], score=9.0)
    for values in ((*exactly(1.0), None), (None, *exactly(1.0)), exactly(1.0)):
        rejects(
            "s: a change at release 1, expected figures", Series, name="s", unit="ms", values=values, changes=(point,)
        )
