"""Judgement of the newest release of a history, as a row of the gate for each batch size.

A row fails if time rose by LEAST_RISE at one of the RECENT releases and the newest release is nearer to the new level
than to the old one. Older rises are only shown.
"""

from functools import partial
from pathlib import Path

from ground.files import write_json
from ground.records import json_from_record, record_from_file
from perf.stats.changes import LEAST_VALUES, ChangePoint
from perf.stats.trend import LEAST_RISE, BatchTrend, Series, Trend, standing_change

from .gate import JudgedRule

KIND, VERSION = "history", 1
AGAIN = "make the record again with `corp-deploy gate --history`"
METRIC = "history"


def save_trend(trend: Trend, path: Path) -> None:
    write_json(path, {"kind": KIND, "version": VERSION, **json_from_record(trend)}, indent=1)


def load_trend(path: Path) -> Trend:
    return record_from_file(path, Trend, kind=KIND, version=VERSION, remedy=AGAIN)


def judge_history(trend: Trend) -> tuple[JudgedRule, ...]:
    return tuple(_row(trend, batch) for batch in trend.batches)


def change_text(trend: Trend, change: ChangePoint) -> str:
    """Return a text such as `time rose 3.1 % (2.7 to 3.5) at release 3 of 5, 20260501T120000Z-..., found at ...`."""
    low, mid, high = (100 * (end - 1) for end in (change.ratio.low, change.ratio.value, change.ratio.high))
    verb, sign = ("rose", 1) if change.is_rise else ("fell", -1)
    ends = sorted((sign * low, sign * high))
    later = "" if change.found == change.first else f", found at release {change.found + 1}"
    place = f"release {change.first + 1} of {len(trend.releases)}, {trend.releases[change.first]}"
    return f"time {verb} {sign * mid:.1f} % ({ends[0]:.1f} to {ends[1]:.1f}) at {place}{later}"


def standing_rise(series: Series) -> ChangePoint | None:
    change = standing_change(series)
    return change if change is not None and change.is_rise else None


def _row(trend: Trend, batch: BatchTrend) -> JudgedRule:
    series = batch.judged
    judged = partial(JudgedRule, rule=f"history: time rose at b{batch.batch} ({series.name})", metric=METRIC)
    if series.values[-1] is None:
        return judged(verdict="INCONCLUSIVE", message=batch.missing or "no figure in this record")
    measured_count = sum(value is not None for value in series.values)
    count = len(trend.left_out)
    left_out = f"; {count} {'record' if count == 1 else 'records'} left out" if count else ""
    if measured_count < LEAST_VALUES:
        noun = "release" if measured_count == 1 else "releases"
        message = f"{measured_count} comparable {noun}, changes are searched from {LEAST_VALUES} on{left_out}"
        return judged(verdict="UNJUDGED", message=message)
    rise = standing_rise(series)
    if rise is None:
        last = change_text(trend, series.changes[-1]) if series.changes else f"no change in {measured_count} releases"
        return judged(verdict="PASS", message=last + left_out)
    message, (value, low, high) = change_text(trend, rise) + left_out, rise.ratio.figures
    return judged(verdict="FAIL", message=message, value=value, low=low, high=high, bound=1 + LEAST_RISE)
