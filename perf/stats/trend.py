"""Latency over releases: a series for each subject and batch size.

Medians of equal models differ by about 1.2 % between benches, ratios to a reference by 0.2 %. Changes are therefore
searched in that ratio if all releases have the same reference (sha256), else in the candidate's median.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ground.errors import BadInput
from perf.record.runs import FARED, Bench, differing_keys

from .changes import ALPHA, LEAST_NOISE, ChangePoint, change_points, critical_score
from .quiet import comparison_measure, is_disturbed, launches_of_spans, samples, throttle_reasons, throttled_line
from .releases import History, LeftOut, Release, comparable_releases
from .stats import Interval, median, median_interval
from .summary import BUSY, speedup

CONFIDENCE_95 = 1.96
SHOWN_KEYS = 4
RECENT = 5
LEAST_RISE = 0.01  # smaller rises are shown but fail nothing
TOO_FEW_ROUNDS = "too few rounds for an interval; measure longer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One figure by release, None if it is not reliable; `unit` is ms, x for the speed-up, or another one.

    `changes` count releases from 0. Their ratios are ratios of the figure, or of time for a speed-up.
    """

    name: str
    unit: str
    values: tuple[Interval | None, ...]
    judged: bool = False
    changes: tuple[ChangePoint, ...] = ()

    def __post_init__(self) -> None:
        for first in (change.first for change in self.changes):
            if not 0 < first < len(self.values) or self.values[first] is None or not any(self.values[:first]):
                raise BadInput(f"{self.name}: a change at release {first}, expected figures there and before it")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrend:
    """Medians of both subjects and speed-up at one batch size; `missing` is why the newest release has no figure."""

    batch: int
    series: tuple[Series, Series, Series]
    missing: str | None = None

    def __post_init__(self) -> None:
        if sum(series.judged for series in self.series) != 1 or len({len(s.values) for s in self.series}) != 1:
            raise BadInput(f"a trend has series of equal length and judges one of them, batch {self.batch} does not")

    @property
    def judged(self) -> Series:
        return next(series for series in self.series if series.judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """All batch sizes of the newest release over the comparable releases; `test` describes the change-point test."""

    releases: tuple[str, ...]
    batches: tuple[BatchTrend, ...]
    left_out: tuple[LeftOut, ...]
    test: str

    def __post_init__(self) -> None:
        if not self.batches:
            raise BadInput("a trend needs at least one batch size")
        if any(len(series.values) != len(self.releases) for batch in self.batches for series in batch.series):
            raise BadInput(
                "a trend needs a figure or None for each of its releases, this one has another number of them"
            )


def build_trend(history: History, newest: Release) -> Trend:
    releases, left_out = comparable_releases(history, newest, _find_mismatch)
    benches = [release.bench for release in releases]
    rows = [row.batch for row in newest.bench.rows]
    critical = critical_score(ALPHA / max(len(rows), 1))
    return Trend(
        releases=tuple(release.name for release in releases),
        batches=tuple(_batch_trend(benches, batch, critical) for batch in rows),
        left_out=tuple(left_out),
        test=describe_test(critical),
    )


def describe_test(critical: float) -> str:
    return (
        f"change-point model by Student's t, looked at after every release; a score from {critical:.2f} on is a "
        f"change, which {100 * ALPHA:g} % of histories of 30 releases without one reach"
    )


def latency_values(series: Series) -> tuple[list[int], list[float]]:
    """Return the indices of releases with a figure, and the figures as times in ms or reciprocal speed-ups."""
    measured = [(place, value.value) for place, value in enumerate(series.values) if value is not None]
    places, values = [place for place, _ in measured], [value for _, value in measured]
    return places, [1 / value for value in values] if series.unit == "x" else values


def standing_change(series: Series) -> ChangePoint | None:
    """Return the last change if it is recent and of LEAST_RISE, and the newest figure is nearer to its level."""
    if not series.changes or series.values[-1] is None:
        return None
    change = series.changes[-1]
    recent, step = change.first >= len(series.values) - RECENT, abs(math.log(change.ratio.value))
    if not recent or step < math.log1p(LEAST_RISE):
        return None
    places, values = latency_values(series)
    start = series.changes[-2].first if len(series.changes) > 1 else 0
    level = [math.log(v) for place, v in zip(places, values, strict=True) if start <= place < change.first]
    beyond = math.log(values[-1]) - sum(level) / len(level)
    return change if (beyond if change.is_rise else -beyond) > step / 2 else None


def _find_mismatch(bench: Bench, newest: Bench) -> str | None:
    differ = sorted(differing_keys(bench, newest))
    if not differ:
        return None
    more = f" and {len(differ) - SHOWN_KEYS} more" if len(differ) > SHOWN_KEYS else ""
    return f"measured differently: {', '.join(differ[:SHOWN_KEYS])}{more}"


def _batch_trend(benches: Sequence[Bench], batch: int, critical: float) -> BatchTrend:
    figures = [read_figures(bench, batch) for bench in benches]
    reference, candidate, ratio = zip(*(figure for figure, _ in figures), strict=True)
    paired = has_same_reference(benches)
    newest = benches[-1]
    series = (
        Series(name=f"{newest.reference.name} p50", unit="ms", values=reference),
        Series(name=f"{newest.candidate.name} p50", unit="ms", values=candidate, judged=not paired),
        Series(name="speed-up", unit="x", values=ratio, judged=paired),
    )
    first, second, third = (
        replace(each, changes=find_changes(each, critical)) if each.judged else each for each in series
    )
    return BatchTrend(batch=batch, series=(first, second, third), missing=figures[-1][1])


def has_same_reference(benches: Sequence[Bench]) -> bool:
    """Return whether all benches are known to have the same reference, so that their speed-ups can be compared."""
    digests = {bench.reference.sha256 for bench in benches}
    return len(digests) == 1 and None not in digests


def find_changes(series: Series, critical: float) -> tuple[ChangePoint, ...]:
    places, values = latency_values(series)
    own = [value.half_width_rel for value in series.values if value is not None]
    noise = max(LEAST_NOISE, median(own) / CONFIDENCE_95 if own else 0.0)
    points = change_points(values, critical, noise=noise)
    return tuple(replace(point, first=places[point.first], found=places[point.found]) for point in points)


_Figures = tuple[Interval | None, Interval | None, Interval | None]
_NO_FIGURES: _Figures = (None, None, None)


def read_figures(bench: Bench, batch: int) -> tuple[_Figures, str | None]:
    """Return both medians and the speed-up at a batch size, and the reason if there are none."""
    row = bench.row(batch)
    if row is None:
        return _NO_FIGURES, f"not measured at batch {batch}"
    for name, trial in row.trials.items():
        if trial.status != "ok":
            return _NO_FIGURES, f"{name} {FARED[trial.status]}: {trial.message}"
    if throttled := throttle_reasons(row.blocks):
        return _NO_FIGURES, throttled_line(throttled)
    if is_disturbed(row.blocks):
        return _NO_FIGURES, BUSY
    faster = speedup(row.blocks, bench.reference.name, bench.candidate.name)
    if faster is None or not faster.is_bounded:
        return _NO_FIGURES, TOO_FEW_ROUNDS
    if comparison_measure(row.blocks) != "compute":  # calls overlap, so their own times don't count
        return (None, None, faster), None
    launches = launches_of_spans(row.blocks)
    medians = [median_interval(samples(row.blocks, subject.name), launches=launches) for subject in bench.subjects]
    reference, candidate = (each if each.is_bounded else None for each in medians)
    return (reference, candidate, faster), None
