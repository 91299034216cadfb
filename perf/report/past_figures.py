"""Figures of releases over time: time, throughput and energy by batch size, size, and agreement, with their changes.

Change points of times are those of the gate. Size, and agreement on the same inputs, are exact, so that each step of
LEAST_STEP is a change.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from perf.parity.parity import Parity
from perf.record.runs import ENERGY, Bench, Row
from perf.stats.changes import ChangePoint
from perf.stats.compare import ratio_of_independent
from perf.stats.energy import summarise_energy
from perf.stats.quiet import throttled_line
from perf.stats.releases import PARITY, Release
from perf.stats.stats import Interval, exact_interval
from perf.stats.summary import throughput
from perf.stats.trend import TOO_FEW_ROUNDS, Series, find_changes, has_same_reference, read_figures

from .content import shipped_link

LEAST_STEP = 0.005
RATE, SHARE, BYTES, SPEEDUP, JOULES = "images/s", "share", "B", "x", "J/image"
Cell = Interval | str
"""A figure of a release, or the reason why it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRelease:
    """A release with its name for readers and the files beside its record; `missing` says why one isn't there."""

    release: Release
    label: str
    model: str | None = None
    parity: Parity | None = None
    recipe: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def bench(self) -> Bench:
        return self.release.bench


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Series of one batch size, or of the model (`batch` is None); judged ones can make the newest release worse.

    `gaps` have the index of a release, the figures that it lacks, and the reason.
    """

    batch: int | None
    series: tuple[Series, ...]
    gaps: tuple[tuple[int, str, str], ...] = ()


def timed_panel(releases: Sequence[PastRelease], batch: int, critical: float) -> Panel:
    benches = [release.bench for release in releases]
    dense, reduced = (subject.name for subject in benches[-1].subjects)
    heads = [(f"{dense} p50", "ms"), (f"{reduced} p50", "ms"), ("speed-up", SPEEDUP), (f"{reduced} throughput", RATE)]
    if any(row is not None and row.energy for row in (bench.row(batch) for bench in benches)):
        heads.append((f"{reduced} energy", JOULES))
    cells = [_timed_cells(bench, batch)[: len(heads)] for bench in benches]
    paired = has_same_reference(benches)

    def find(series: Series) -> tuple[ChangePoint, ...]:
        return find_changes(series, critical) if paired or series.unit != SPEEDUP else ()

    return _panel(batch, heads, cells, find, noted=heads[0])


def model_panel(releases: Sequence[PastRelease]) -> Panel:
    sizes = [release.bench.candidate.size_bytes for release in releases]
    last = next((release.parity for release in reversed(releases) if release.parity is not None), None)
    shipped = None if last is None else shipped_link(last).measures
    shares = shipped is None or shipped.agreement is not None
    head = ("agreement" if shipped is None else shipped.agreement_name, SHARE) if shares else ("relative error", "")
    cells = [
        (exact_interval(size) if size else "the bench record has none", _agreement(release, last, shares=shares))
        for size, release in zip(sizes, releases, strict=True)
    ]
    return _panel(None, [("size", BYTES), head], cells, lambda series: tuple(_steps(series.values)))


def _panel(
    batch: int | None,
    heads: Sequence[tuple[str, str]],
    cells: Sequence[Sequence[Cell]],
    find: Callable[[Series], tuple[ChangePoint, ...]],
    *,
    noted: tuple[str, str] | None = None,
) -> Panel:
    """Return the panel of these columns, each a name and unit, with the cells of each release; `noted` isn't judged."""
    series = [
        Series(
            name=head[0],
            unit=head[1],
            values=tuple(each if isinstance(each, Interval) else None for each in column),
            judged=head != noted,
        )
        for head, column in zip(heads, zip(*cells, strict=True), strict=True)
    ]
    gaps = []
    for place, row in enumerate(cells):
        names = dict[str, list[str]]()
        for (name, _), cell in zip(heads, row, strict=True):
            if isinstance(cell, str):
                names.setdefault(cell, []).append(name_at(name, batch))
        for why, lacking in names.items():
            gaps.append((place, name_at("figures", batch) if len(lacking) == len(heads) else ", ".join(lacking), why))
    found = tuple(replace(each, changes=find(each)) for each in series)
    return Panel(batch=batch, series=found, gaps=tuple(gaps))


def name_at(name: str, batch: int | None) -> str:
    return name if batch is None else f"{name} at batch {batch}"


def _timed_cells(bench: Bench, batch: int) -> tuple[Cell, ...]:
    """Return both medians, speed-up, throughput and energy."""
    (dense, reduced, faster), why = read_figures(bench, batch)
    row = bench.row(batch)
    if why is not None or row is None or faster is None:
        return (why or TOO_FEW_ROUNDS,) * 5
    return (
        dense or "calls overlap",
        reduced or "calls overlap",
        faster,
        _rate(bench, row),
        _joules(bench, row),
    )


def _rate(bench: Bench, row: Row) -> Cell:
    if bench.settings.get("flush_l2"):
        return "the L2 cache was flushed"
    rate = throughput(row, bench.candidate.name)
    return rate if rate is not None and rate.is_bounded else TOO_FEW_ROUNDS


def _joules(bench: Bench, row: Row) -> Cell:
    if row.energy is None:
        return str(bench.settings.get(ENERGY) or "the record is older than its measurement")
    energy = summarise_energy(row.energy, [subject.name for subject in bench.subjects])
    if energy.throttled:
        return throttled_line(energy.throttled)
    joules = energy.joules.get(bench.candidate.name)
    if joules is None:
        return "it takes no more power than the idle machine"
    return joules if joules.is_bounded else TOO_FEW_ROUNDS


def _agreement(release: PastRelease, last: Parity | None, *, shares: bool) -> Cell:
    """Return the shipped model's agreement, or its error if not `shares`, on the inputs of the newest proof."""
    parity = release.parity
    if parity is None or last is None:
        return release.missing.get(PARITY, "no parity record is kept")
    if parity.images.digest != last.images.digest:
        return f"judged on other {parity.images.noun} than the newest proof"
    measures = shipped_link(parity).measures
    share, error = measures.agreement, measures.relative_error
    if shares and share is not None:
        low, high = measures.agreement_bounds or (share, share)
        return Interval(value=share, low=min(low, share), high=max(high, share))
    return "the proof has no such figure" if shares or not math.isfinite(error) else exact_interval(error)


def _steps(values: Sequence[Interval | None]) -> Iterator[ChangePoint]:
    """Yield each step of LEAST_STEP between neighbouring exact figures."""
    known = [(place, value) for place, value in enumerate(values) if value is not None and value.value > 0]
    for (_, before), (place, after) in pairwise(known):
        ratio = ratio_of_independent(after, before)
        if abs(math.log(ratio.value)) >= math.log1p(LEAST_STEP):
            yield ChangePoint(first=place, found=place, ratio=ratio, score=math.copysign(math.inf, ratio.value - 1))
