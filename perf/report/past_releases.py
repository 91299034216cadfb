"""Releases over time: lines of comparable releases, the changes of their figures, and what differs at each of them.

A line has the releases of one model on one machine in one precision. The driver, libraries, settings and recipe may
differ within it, and are named where a figure changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ground.errors import BadInput
from perf.record.runs import SETTINGS_MUST_MATCH, Bench, Scalar
from perf.stats.changes import ALPHA, LEAST_VALUES, ChangePoint, critical_score
from perf.stats.compare import list_differences
from perf.stats.releases import MANIFEST, RECIPE, History, LeftOut, Release, comparable_releases
from perf.stats.stats import Interval
from perf.stats.trend import Series, describe_test, has_same_reference, standing_change

from .past_figures import RATE, SHARE, SPEEDUP, Panel, PastRelease, model_panel, name_at, timed_panel

MACHINE = ("machine", "cpu", "cpu_count", "gpu", "gpu_count", "sm")
TARGET = ("backend", "device", "precision")
ALWAYS_DIFFER = ("load_average",)
HIGHER_IS_BETTER = (RATE, SHARE, SPEEDUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A figure that changed, with its values at the releases on both sides; `batch` is None for one of the model."""

    batch: int | None
    series: Series
    point: ChangePoint
    before: Interval
    after: Interval

    @property
    def name(self) -> str:
        return name_at(self.series.name, self.batch)

    @property
    def ratio(self) -> Interval:
        """The ratio of the figure, while that of a speed-up's change point is one of time."""
        ratio = self.point.ratio
        if self.series.unit != SPEEDUP:
            return ratio
        return Interval(value=1 / ratio.value, low=1 / ratio.high, high=1 / ratio.low)

    @property
    def is_worse(self) -> bool:
        return (self.ratio.value > 1) != (self.series.unit in HIGHER_IS_BETTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Figures that changed from release `before` to release `first`, and all that differs between these releases.

    `differences` have key, value before and value after. `uncompared` says which files one of them lacks.
    """

    before: int
    first: int
    moves: tuple[Move, ...]
    differences: tuple[tuple[str, Scalar, Scalar], ...]
    uncompared: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Comparable releases with their panels and changes; `standing` are the judged moves that last until now."""

    name: str
    releases: tuple[PastRelease, ...]
    panels: tuple[Panel, ...]
    changes: tuple[Change, ...]
    standing: tuple[Move, ...]
    test: str

    @property
    def gaps(self) -> tuple[tuple[tuple[int, ...], str, str], ...]:
        """The indices of releases, the figures that they lack for the same reason, and the reason."""
        names, places = dict[tuple[int, str], list[str]](), dict[tuple[str, str], list[int]]()
        for place, name, why in (each for panel in self.panels for each in panel.gaps):
            names.setdefault((place, why), []).append(name)
        for (place, why), each in names.items():
            places.setdefault((", ".join(each), why), []).append(place)
        return tuple(sorted((tuple(found), name, why) for (name, why), found in places.items()))

    @property
    def lacks_newest(self) -> bool:
        """True if the newest release lacks a figure that an earlier release has."""
        every = (series.values for panel in self.panels for series in panel.series)
        return any(values[-1] is None and any(values) for values in every)

    @property
    def is_judged(self) -> bool:
        return len(self.releases) >= LEAST_VALUES

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what is not compared."""
        benches = [release.bench for release in self.releases]
        shown = {panel.batch for panel in self.panels}
        others = sorted({row.batch for bench in benches for row in bench.rows} - shown)
        unlike = "The dense model's file is not known to be the same in all releases: changes of the speed-up are not "
        unlike += "looked for."
        older = f"Not shown, as the newest release was not measured there: batch {', '.join(map(str, others))}."
        return (*([] if has_same_reference(benches) else [unlike]), *([older] if others else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class PastReleases:
    """The lines of a history, that of the newest release first, and the files that are no records."""

    lines: tuple[Line, ...]
    left_out: tuple[LeftOut, ...]


def build_past_releases(history: History, read: Callable[[Release], PastRelease], *, where: str) -> PastReleases:
    """Sort the releases of a history into lines and compare them; `read` reads the files beside a release's record."""
    if not history.releases:
        why = f"; left out: {history.left_out[0].name} ({history.left_out[0].reason})" if history.left_out else ""
        raise BadInput(
            f"{where}: no bench record of a release, expected at least one; `gate --history` and the recipe key "
            f"gate.history keep them, and a folder with a bench.json counts as a release{why}"
        )
    different, left_out = comparable_releases(history, history.releases[-1], lambda bench, newest: None)
    rest, lines = [read(release) for release in different], list[Line]()
    while rest:
        newest = rest[-1]
        own = [release for release in rest if not _other_line(release, newest)]
        rest = [release for release in rest if _other_line(release, newest)]
        lines.append(_line(own, lines))
    return PastReleases(lines=tuple(lines), left_out=tuple(left_out))


def _line(releases: Sequence[PastRelease], others: Sequence[Line]) -> Line:
    newest = releases[-1]
    batches = [row.batch for row in newest.bench.rows]
    critical = critical_score(ALPHA / max(len(batches), 1))
    panels = (*(timed_panel(releases, batch, critical) for batch in batches), model_panel(releases))
    moves = [
        (series, move_at(panel.batch, series, point))
        for panel in panels
        for series in panel.series
        for point in series.changes
    ]
    return Line(
        name=_name_of_line(newest, others),
        releases=tuple(releases),
        panels=panels,
        changes=tuple(_changes(releases, [move for _, move in moves])),
        standing=tuple(move for series, move in moves if series.judged and move.point is standing_change(series)),
        test=describe_test(critical),
    )


def _name_of_line(newest: PastRelease, others: Sequence[Line]) -> str:
    """Return model, machine and target, with the keys that differ from an earlier line of the same name."""
    machine, described = newest.bench.environment, newest.bench.candidate.describe
    target = " ".join(str(described[key]) for key in TARGET if described.get(key))
    parts = (newest.model, machine.get("gpu") or machine.get("cpu"), target)
    name = ", ".join(str(part) for part in parts if part)
    twin = next((line for line in others if line.name == name), None)
    if twin is None:
        return name
    own, differ = _traits(newest), _other_line(newest, twin.releases[-1])
    return f"{name}, {', '.join(f'{key} {own[key]}' for key in differ)}"


def _traits(release: PastRelease) -> dict[str, Scalar]:
    """Return what all releases of a line share."""
    bench = release.bench
    places = ((bench.environment, MACHINE), (bench.settings, SETTINGS_MUST_MATCH), (bench.candidate.describe, TARGET))
    return {key: values.get(key) for values, keys in places for key in keys} | {
        "model": release.model,
        "dense multiply-adds": bench.reference.macs,
    }


def _other_line(release: PastRelease, newest: PastRelease) -> list[str]:
    """Return the differing traits; multiply-adds of the dense models tell models without a known name apart."""
    own, others = _traits(release), _traits(newest)
    unknown = release.model is None or newest.model is None
    free = {"model"} if unknown else {"dense multiply-adds"}
    return [key for key in own if key not in free and own[key] != others[key]]


def move_at(batch: int | None, series: Series, point: ChangePoint) -> Move:
    before = next(value for value in reversed(series.values[: point.first]) if value is not None)
    after = series.values[point.first]
    assert after is not None, (series.name, point)
    return Move(batch=batch, series=series, point=point, before=before, after=after)


def _changes(releases: Sequence[PastRelease], moves: Sequence[Move]) -> Iterator[Change]:
    for first in sorted({move.point.first for move in moves}):
        moved = tuple(move for move in moves if move.point.first == first)
        before = max(max(place for place in range(first) if move.series.values[place] is not None) for move in moved)
        pair = releases[before], releases[first]
        lacking = [
            f"{name} of release {place + 1}: {release.missing[name]}"
            for place, release in zip((before, first), pair, strict=True)
            for name in (RECIPE, MANIFEST)
            if name in release.missing
        ]
        differences, uncompared = tuple(_differences(*pair)), tuple(lacking)
        yield Change(before=before, first=first, moves=moved, differences=differences, uncompared=uncompared)


def _differences(before: PastRelease, after: PastRelease) -> Iterator[tuple[str, Scalar, Scalar]]:
    """Yield the differing keys of the recipes, of machine, settings and models, and of other versions."""
    if before.recipe and after.recipe:
        yield from _differing("recipe ", before.recipe, after.recipe)
    yield from _differing_in_benches(before.bench, after.bench)
    if before.versions and after.versions:
        own = {key.replace("_", "-") for key in after.bench.environment}
        others = [{key: v for key, v in each.versions.items() if key not in own} for each in (before, after)]
        yield from _differing("", *others)


def _differing_in_benches(before: Bench, after: Bench) -> Iterator[tuple[str, Scalar, Scalar]]:
    """Yield differing keys; one that differs alike for both subjects once, without a library's second version."""
    dense, reduced = (f"{subject.name}." for subject in after.subjects)
    found = {each.key: (each.before, each.after) for each in list_differences(before, after)}
    shared = {key.removeprefix(dense) for key in found if key.startswith(dense)}
    shared = {name for name in shared if found[dense + name] == found.get(reduced + name)}
    libraries = [pair for key, pair in found.items() if key in after.environment]
    for key, pair in found.items():
        name = key.removeprefix(dense)
        if key.startswith(dense) and name in shared:
            if name != "version" or pair not in libraries:
                yield (name, *pair)
        elif key not in ALWAYS_DIFFER and key.removeprefix(reduced) not in shared:
            yield (key, *pair)


def _differing(
    prefix: str, before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[tuple[str, Scalar, Scalar]]:
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            yield (prefix + key, before.get(key), after.get(key))
