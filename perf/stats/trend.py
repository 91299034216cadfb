"""Latency over releases, from bench records in one directory: a series for each subject and batch size.

Records are never overwritten. Their files are named by time and digest, so that several processes may add some.

Medians of equal models differ by about 1.2 % between benches, ratios to a reference by 0.2 %. Changes are therefore
searched in that ratio if all releases have the same reference (sha256), else in the candidate's median.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ground.errors import BadInput
from ground.files import replacing, sha256_of_file
from ground.text import printable
from perf.record.runs import FARED, Bench, differing_keys, load_bench

from .changes import ALPHA, LEAST_NOISE, ChangePoint, change_points, critical_score
from .quiet import comparison_measure, is_disturbed, samples, throttle_reasons
from .stats import Interval, median, median_interval
from .summary import BUSY, speedup, throttled_line

DIGEST_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One bench record with its name in a history: time and digest."""

    name: str
    bench: Bench


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A file or record that a trend leaves out, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The releases in the order of measurement, and the files that are no records."""

    releases: tuple[Release, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def release_of_file(path: Path) -> Release:
    bench = load_bench(path)
    try:
        created = datetime.fromisoformat(bench.created)
        at = (created if created.tzinfo else created.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadInput(
            f"{path}: a history is in order of time, but this record was created {bench.created[:100]!r}; expected a "
            f"time such as 2026-05-01T12:00:00+00:00; measure again with `bench`"
        ) from None
    name = f"{at:%Y%m%dT%H%M%S}Z-{sha256_of_file(path)[:DIGEST_LETTERS]}"
    return Release(name=name, bench=bench)


def require_directory(directory: Path) -> None:
    for place in (directory, *directory.parents):
        if place.exists() and not place.is_dir():
            raise BadInput(f"{place}: a file, expected the directory that keeps the bench records of releases")


def load_history(directory: Path) -> History:
    require_directory(directory)
    releases: list[Release] = []
    left_out = []
    for path in sorted(directory.iterdir() if directory.is_dir() else ()):
        if path.name.startswith("."):
            continue  # a record that another process is writing
        try:
            if path.suffix != ".json":
                raise BadInput(f"{path}: expected a bench record with a name that ends in .json")
            release = release_of_file(path)
            time, _, digest = path.stem.partition("-")
            if path.stem != release.name and time.endswith("Z") and len(digest) == DIGEST_LETTERS:
                raise BadInput(f"{path}: changed after it was kept, it is {release.name} now")
            releases.append(release)
        except BadInput as error:
            reason = printable(str(error).removeprefix(f"{path}: "))
            left_out.append(LeftOut(name=printable(path.name), reason=reason))
    releases.sort(key=lambda release: release.name)
    return History(releases=tuple(releases), left_out=tuple(left_out))


def add_release(directory: Path, record: Path) -> bool:
    require_directory(directory)
    path = directory / f"{release_of_file(record).name}.json"
    if path.exists():
        return False
    with replacing(path) as temporary:
        shutil.copyfile(record, temporary)
    return True


CONFIDENCE_95 = 1.96
SHOWN_KEYS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One figure by release, None if it is not reliable; `unit` is ms, or x for the speed-up.

    `changes`, which only a `judged` series has, count releases from 0; their ratios are ratios of time.
    """

    name: str
    unit: str
    values: tuple[Interval | None, ...]
    judged: bool = False
    changes: tuple[ChangePoint, ...] = ()


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
        if any(len(series.values) != len(self.releases) for batch in self.batches for series in batch.series):
            raise BadInput(
                "a trend needs a figure or None for each of its releases, this one has another number of them"
            )


def build_trend(history: History, newest: Release) -> Trend:
    left_out = list(history.left_out)
    releases: list[Release] = []
    for release in history.releases:
        reason = _find_mismatch(release, newest)
        if reason is not None:
            left_out.append(LeftOut(name=release.name, reason=reason))
        elif all(release.bench != other.bench for other in (*releases, newest)):  # also if formatted otherwise
            releases.append(release)
    releases.append(newest)
    benches = [release.bench for release in releases]
    rows = [row.batch for row in newest.bench.rows]
    critical = critical_score(ALPHA / max(len(rows), 1))
    return Trend(
        releases=tuple(release.name for release in releases),
        batches=tuple(_batch_trend(benches, batch, critical) for batch in rows),
        left_out=tuple(left_out),
        test=(
            f"change-point model by Student's t, looked at after every release; a score from {critical:.2f} on is a "
            f"change, which {100 * ALPHA:g} % of histories of 30 releases without one reach"
        ),
    )


def latency_values(series: Series) -> tuple[list[int], list[float]]:
    """Return the indices of releases with a figure, and the figures as times in ms or reciprocal speed-ups."""
    measured = [(place, value.value) for place, value in enumerate(series.values) if value is not None]
    places, values = [place for place, _ in measured], [value for _, value in measured]
    return places, [1 / value for value in values] if series.unit == "x" else values


def _find_mismatch(release: Release, newest: Release) -> str | None:
    if release.name > newest.name and release.bench != newest.bench:
        return "measured after the record that is judged"
    differ = sorted(differing_keys(release.bench, newest.bench))
    if not differ:
        return None
    more = f" and {len(differ) - SHOWN_KEYS} more" if len(differ) > SHOWN_KEYS else ""
    return f"measured differently: {', '.join(differ[:SHOWN_KEYS])}{more}"


def _batch_trend(benches: Sequence[Bench], batch: int, critical: float) -> BatchTrend:
    figures = [_read_figures(bench, batch) for bench in benches]
    reference, candidate, ratio = zip(*(figure for figure, _ in figures), strict=True)
    digests = {bench.reference.sha256 for bench in benches}
    paired = len(digests) == 1 and None not in digests
    newest = benches[-1]
    series = (
        Series(name=f"{newest.reference.name} p50", unit="ms", values=reference),
        Series(name=f"{newest.candidate.name} p50", unit="ms", values=candidate, judged=not paired),
        Series(name="speed-up", unit="x", values=ratio, judged=paired),
    )
    first, second, third = (
        replace(each, changes=_find_changes(each, critical)) if each.judged else each for each in series
    )
    return BatchTrend(batch=batch, series=(first, second, third), missing=figures[-1][1])


def _find_changes(series: Series, critical: float) -> tuple[ChangePoint, ...]:
    places, values = latency_values(series)
    own = [value.half_width_rel for value in series.values if value is not None]
    noise = max(LEAST_NOISE, median(own) / CONFIDENCE_95 if own else 0.0)
    points = change_points(values, critical, noise=noise)
    return tuple(replace(point, first=places[point.first], found=places[point.found]) for point in points)


_Figures = tuple[Interval | None, Interval | None, Interval | None]
_NO_FIGURES: _Figures = (None, None, None)


def _read_figures(bench: Bench, batch: int) -> tuple[_Figures, str | None]:
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
        return _NO_FIGURES, "too few rounds for an interval; measure longer"
    if comparison_measure(row.blocks) != "compute":  # calls overlap, so their own times don't count
        return (None, None, faster), None
    medians = [median_interval(samples(row.blocks, subject.name)) for subject in bench.subjects]
    reference, candidate = (each if each.is_bounded else None for each in medians)
    return (reference, candidate, faster), None
