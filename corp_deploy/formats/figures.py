"""Figures of bench and parity records, one by one, for formats that list names and values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from perf.gate.evidence import Evidence
from perf.gate.parity_figures import shipped_links
from perf.parity.parity import Parity
from perf.record.runs import Bench
from perf.stats.stats import Interval
from perf.stats.summary import summarise

Measure = Literal[
    "p50", "p90", "peak memory", "throughput", "speed-up", "joules per image", "size", "agreement", "accuracy"
]
UNITS: dict[Measure, str] = {
    "joules per image": "J",
    **{"p50": "ms", "p90": "ms", "peak memory": "bytes", "size": "bytes"},
    **{"throughput": "images/s", "speed-up": "times", "agreement": "share", "accuracy": "share"},
}
BIGGER_IS_BETTER = ("throughput", "speed-up", "agreement", "accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a model, and the ends of its interval if it has one.

    `batch` and `output` are None if the figure holds for every batch size or for the whole model.
    """

    subject: str
    measure: Measure
    value: float
    low: float | None = None
    high: float | None = None
    batch: int | None = None
    output: str | None = None

    @property
    def unit(self) -> str:
        return UNITS[self.measure]


def figures_of(now: Evidence) -> Iterator[Figure]:
    """Yield the figures of a gate's records: times of both models by batch size, sizes, agreement and accuracies."""
    yield from () if now.bench is None else _measured(now.bench)
    yield from () if now.parity is None else _proved(now.parity)


def _measured(bench: Bench) -> Iterator[Figure]:
    for row in summarise(bench).rows:
        for side in (each for each in row.sides.values() if each.status == "ok"):
            yield from _figure(side.name, "p50", side.p50_ms, row.batch)
            yield from _figure(side.name, "p90", None if side.p90_ms is None else side.p90_ms.value, row.batch)
            yield from _figure(side.name, "peak memory", side.peak_memory_bytes, row.batch)
            yield from _figure(side.name, "throughput", side.throughput, row.batch)
            yield from _figure(side.name, "joules per image", row.joules(side.name), row.batch)
        yield from _figure(bench.candidate.name, "speed-up", row.speedup, row.batch)
    for subject in bench.subjects:
        yield from _figure(subject.name, "size", subject.size_bytes)


def _figure(
    subject: str, measure: Measure, found: Interval | float | None, batch: int | None = None
) -> Iterator[Figure]:
    if found is not None:
        value, low, high = found.figures if isinstance(found, Interval) else (float(found), None, None)
        yield Figure(subject=subject, measure=measure, value=value, low=low, high=high, batch=batch)


def _proved(parity: Parity) -> Iterator[Figure]:
    for link in shipped_links(parity.links):
        measures, subject, output = link.measures, link.candidate, link.output
        share, (low, high) = measures.agreement, measures.agreement_bounds or (None, None)
        if share is not None:
            yield Figure(subject=subject, output=output, measure="agreement", value=share, low=low, high=high)
    for row in parity.accuracy:
        yield Figure(subject=row.model, measure="accuracy", value=row.accuracy, low=row.low, high=row.high)
