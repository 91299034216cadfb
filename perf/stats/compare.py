"""Comparison of two bench records: differences of their machines and settings first, then the figures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from ground.quantity import format_number
from ground.text import markdown_line
from perf.record.runs import Bench, Scalar, differing_keys

from .stats import Interval
from .summary import SubjectSummary, summarise

Change = Literal["faster", "slower", "not significant", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A differing key of environment, settings or a subject's description; a decisive one forbids the comparison."""

    key: str
    before: Scalar
    after: Scalar
    decisive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One subject at one batch size in both records; `ratio` is p50 after over before, None if either lacks it."""

    batch: int
    subject: str
    before: SubjectSummary | None
    after: SubjectSummary | None
    ratio: Interval | None

    @property
    def change(self) -> Change:
        if self.ratio is None or not self.ratio.is_bounded:
            return "unknown"
        if self.ratio.low > 1:
            return "slower"
        return "faster" if self.ratio.high < 1 else "not significant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences and rows of two records; not comparable if a decisive key differs."""

    differences: tuple[Difference, ...]
    rows: tuple[ComparedRow, ...]

    @property
    def comparable(self) -> bool:
        return not any(difference.decisive for difference in self.differences)


def compare_records(before: Bench, after: Bench) -> Comparison:
    old, new = summarise(before), summarise(after)
    batches = sorted({row.batch for row in (*old.rows, *new.rows)})
    pairs = ((old.reference, new.reference), (old.candidate, new.candidate))
    rows = []
    for batch, (former, name) in product(batches, pairs):
        found = (old.row(batch), former), (new.row(batch), name)
        then, now = (None if row is None else row.sides[own] for row, own in found)
        p50s = [None if side is None else side.p50_ms for side in (then, now)]
        ratio = None if p50s[0] is None or p50s[1] is None else ratio_of_independent(p50s[1], p50s[0])
        rows.append(ComparedRow(batch=batch, subject=name, before=then, after=now, ratio=ratio))
    return Comparison(differences=tuple(list_differences(before, after)), rows=tuple(rows))


def ratio_of_independent(after: Interval, before: Interval) -> Interval:
    """Return the ratio of two independent figures, their relative errors added in quadrature."""
    value = after.value / before.value
    below = math.hypot(1 - after.low / after.value, before.high / before.value - 1)
    above = math.hypot(after.high / after.value - 1, 1 - before.low / before.value)
    return Interval(value=value, low=max(value * (1 - below), 0.0), high=value * (1 + above))


def markdown_from_comparison(comparison: Comparison) -> str:
    heading = ["| key | before | after |", "|---|---|---|"]
    lines = heading if comparison.differences else ["Environment: no difference."]
    for difference in comparison.differences:
        mark = " (decisive)" if difference.decisive else ""
        shown = (difference.key, difference.before, difference.after)
        key, before, after = (markdown_line(str(each)) for each in shown)
        lines.append(f"| {key}{mark} | {before} | {after} |")
    if not comparison.comparable:
        lines += ["", "**Not comparable**: the rows below were measured differently."]
    lines += [
        "",
        "| batch | subject | p50 before (ms) | p50 after (ms) | after / before | change |",
        "|---|---|---|---|---|---|",
    ]
    for row in comparison.rows:
        ratio = "-" if row.ratio is None else row.ratio.describe(".3f")
        figures = f"{_p50_text(row.before)} | {_p50_text(row.after)} | {ratio}"
        lines.append(f"| {row.batch} | {markdown_line(row.subject)} | {figures} | {row.change} |")
    return "\n".join(lines) + "\n"


def list_differences(before: Bench, after: Bench) -> Iterator[Difference]:
    """Yield the differing keys of two records, the decisive ones first."""
    decisive = differing_keys(before, after)
    for key, (old, new) in decisive.items():
        yield Difference(key=key, before=old, after=new, decisive=True)
    pairs = [("", before.environment, after.environment), ("", before.settings, after.settings)]
    for former, latter in zip(before.subjects, after.subjects, strict=True):
        pairs.append((f"{latter.name}.", former.describe, latter.describe))
        then, now = ({"sha256": each.sha256, "macs": each.macs} for each in (former, latter))
        pairs.append((f"{latter.name}.", then, now))
    for prefix, old_keys, new_keys in pairs:
        for key in sorted({*old_keys, *new_keys}):
            old, new = old_keys.get(key), new_keys.get(key)
            if old != new and prefix + key not in decisive:
                yield Difference(key=prefix + key, before=old, after=new, decisive=False)


def _p50_text(side: SubjectSummary | None) -> str:
    if side is None:
        return "not measured"
    return side.status if side.p50_ms is None else format_number(side.p50_ms.value, 4)
