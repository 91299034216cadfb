"""Goals on a GPU, judged from the records: an interval that straddles the bound leaves a goal undecided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.pages.markdown import interval

Verdict = Literal["met", "not met", "undecided", "not measured"]
Row = Mapping[str, Any]
THROUGHPUT_WANTED = 1.64
SIZES = ("DeiT-T", "DeiT-S", "DeiT-B", "DeiT-L", "DeiT-H")
GEOMETRIES = ("padded", "square", "ragged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A goal, its measured figure and the verdict."""

    wanted: str
    found: str
    verdict: Verdict


def done(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Return the measured rows with these values."""
    return [
        row for row in rows if row["status"] == "done" and all(row.get(key) == value for key, value in wanted.items())
    ]


def at_least(figures: Sequence[float | None] | None, bound: float) -> Verdict:
    """Return whether a ratio (value, low, high; None for an open end) is at least the bound."""
    if figures is None or figures[0] is None:
        return "not measured"
    _, low, high = figures
    if low is not None and low >= bound:
        return "met"
    return "not met" if high is not None and high < bound else "undecided"


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a goal with several parts."""
    order: tuple[Verdict, ...] = ("not met", "not measured", "undecided")
    return next((each for each in order if each in verdicts), "met")


def _speedups(latency: Sequence[Row], geometry: str, **wanted: Any) -> dict[str, Any]:
    rows = done(latency, row="latency", mode="graph", sparsity=0.5, **wanted)
    return {row["model"]: row["subjects"][geometry]["speedup"] for row in rows if geometry in row["subjects"]}


def throughput(latency: Sequence[Row], geometry: str) -> Goal:
    """Return the goal on the throughput of DeiT-H at batch 16, dense over reduced in the same round."""
    found = _speedups(latency, geometry, model="DeiT-H", batch=16).get("DeiT-H")
    return Goal(
        wanted=f"DeiT-H, batch 16, 50 %, {geometry}: throughput at least {THROUGHPUT_WANTED} times dense",
        found="-" if found is None else interval(found),
        verdict=at_least(found, THROUGHPUT_WANTED),
    )


def never_slower(latency: Sequence[Row], geometry: str) -> Goal:
    """Return the goal that no size of DeiT is slower than dense at batch 1."""
    found = _speedups(latency, geometry, batch=1)
    verdicts = [at_least(found.get(size), 1.0) for size in SIZES]
    told = [f"{size} {interval(found[size])}" if size in found else f"{size} -" for size in SIZES]
    return Goal(
        wanted=f"batch 1, 50 %, {geometry}: speed-up at least 1 for every size",
        found=", ".join(told),
        verdict=together(verdicts),
    )


def judged(latency: Sequence[Row]) -> list[Goal]:
    """Return every goal; those not measured stay in the list."""
    goals = [throughput(latency, geometry) for geometry in GEOMETRIES]
    return goals + [never_slower(latency, geometry) for geometry in GEOMETRIES]
