"""Content of a report: the records of one release, with verdicts, lead sentence, tiles and setup."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ground.ports import Role
from ground.records import Figure
from perf.parity.link import Link
from perf.parity.parity import Parity
from perf.record.runs import Bench
from perf.stats.summary import Summary, SummaryRow, summarise
from perf.stats.trend import Trend

from .curves import ImagesPoint
from .numbers import error_text, percent_text, signed_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLine:
    """Widths of a site, and its relative errors without and with compensation, on fitted and held-out images.

    Stream errors are those of the residual stream after the site.
    """

    site: str
    width_dense: str
    width_reduced: str
    error_uncompensated: float | None
    error: float | None
    error_held_out: float | None = None
    stream_error: float | None = None
    stream_error_held_out: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLine:
    """Figures of one model; agreement is with the dense model, device memory is that of the largest profile."""

    name: str
    params: int | None = None
    macs: int | None = None
    size_bytes: int | None = None
    device_memory_bytes: int | None = None
    accuracy: float | None = None
    agreement: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectLine:
    """Figures of one preset at the widths that all presets share."""

    preset: str
    relative_error: float | None = None
    agreement: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """One choice of widths for a budget: its share of the dense cost, and its predicted and measured logit error.

    `measured_error` is that of all images together, `median_error` that of the median image.
    """

    name: str
    share: float
    predicted_error: Figure
    measured_error: Figure
    median_error: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class MergingLines:
    """Merged tokens in sentences, and by block: its index and the tokens that enter, are removed, and leave.

    `verb` is merged or dropped.
    """

    verb: str
    sentences: tuple[str, ...]
    blocks: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLine:
    rule: str
    verdict: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLines:
    verdict: str | None = None
    rules: tuple[GateLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesLines:
    """A sentence on how many calibration images are enough, and figures for each number of them."""

    sentence: str
    points: tuple[ImagesPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortLine:
    """Time and peak memory of one step, in the process and of torch on the GPU; None if not recorded."""

    step: str
    seconds: float | None = None
    peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    machine: str = ""
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class Content:
    """All parts that a report may show; missing parts are None or empty."""

    title: str
    bench: Bench | None = None
    parity: Parity | None = None
    gate: GateLines = GateLines()
    sites: tuple[SiteLine, ...] = ()
    coverage: str = ""
    models: tuple[ModelLine, ...] = ()
    effects: tuple[EffectLine, ...] = ()
    ways: tuple[BudgetLine, ...] = ()
    merging: MergingLines | None = None
    history: Trend | None = None
    calibration_size: ImagesLines | None = None
    effort: tuple[EffortLine, ...] = ()
    lineage: Mapping[str, Any] = field(default_factory=dict)
    commands: tuple[str, ...] = ()

    @cached_property
    def summary(self) -> Summary | None:
        return None if self.bench is None else summarise(self.bench)


def flat_texts(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as texts by dotted keys, without those that are None."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_texts(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return flat


SAME: Mapping[Role, str] = {
    "logits": "top answer",
    "token logits": "top answer of each token",
    "embedding": "nearest neighbour",
    "feature map": "nearest neighbour of each token",
    "score map": "answer at each pixel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLine:
    """A record's verdict in a report, with a headline and the reason."""

    headline: str
    verdict: str
    why: str


def list_verdicts(content: Content) -> list[VerdictLine]:
    lines, gate = [], content.gate
    if gate.verdict is not None:
        unmet = [line.message for line in gate.rules if line.verdict != "PASS"]
        why = "; ".join(unmet) or f"all {len(gate.rules)} rules pass"
        lines.append(VerdictLine(headline=f"Gate {gate.verdict}", verdict=gate.verdict, why=why))
    if content.parity is not None:
        words = f"Parity {content.parity.verdict} ({content.parity.judged})"
        lines.append(VerdictLine(headline=words, verdict=content.parity.verdict, why=content.parity.reason))
    return lines


def build_lead(content: Content) -> str:
    clauses = []
    row = headline_row(content)
    if content.summary and row and row.speedup:
        names = content.summary.candidate, content.summary.reference
        clauses.append(f"{names[0]} is {row.speedup.value:.2f} times as fast as {names[1]} at batch {row.batch}")
    if content.parity:
        shipped = shipped_link(content.parity)
        m = shipped.measures
        if m.agreement is not None:
            same = f"the {SAME[shipped.role]} is the same on {percent_text(m.agreement)}"
            clauses.append(f"{same} of {m.images:,} {m.inputs}")
    sentence = " and ".join(clauses)
    merging = content.merging.sentences[:1] if content.merging else ()
    return " ".join(f"{words[:1].upper()}{words[1:]}." for words in (sentence, content.coverage, *merging) if words)


def describe_setup(content: Content) -> str:
    parts = []
    if content.bench:
        machine, described = content.bench.environment, content.bench.candidate.describe
        parts.append(str(machine.get("gpu") or machine.get("cpu") or ""))
        parts.append(" ".join(str(described[key]) for key in ("backend", "precision") if described.get(key)))
    if content.parity:
        parts.append(f"{content.parity.images.count:,} {content.parity.images.noun}")
    if content.bench:
        parts.append(content.bench.created[:10])
    return " · ".join(part for part in parts if part)


def build_tiles(content: Content) -> list[tuple[str, str]]:
    large = []
    row = headline_row(content)
    if row and row.speedup:
        times, bounds = row.speedup.describe().split(" ", 1)
        large.append((f"{times}×", f"speed-up at batch {row.batch} {bounds}"))
    if content.parity:
        shipped = shipped_link(content.parity)
        m = shipped.measures
        if m.agreement is None:
            large.append((error_text(m.relative_error), f"relative error, {m.images:,} {m.inputs}"))
        else:
            large.append((percent_text(m.agreement), f"same {SAME[shipped.role]}, {m.images:,} {m.inputs}"))
        large += _accuracy_tile(content.parity)
    if len(content.models) >= 2:
        dense, reduced = content.models[:2]
        costs = ("multiply-adds", dense.macs, reduced.macs), ("parameters", dense.params, reduced.params)
        large += [(signed_percent(after / before - 1, 0), what) for what, before, after in costs if before and after]
    return large


def _accuracy_tile(parity: Parity) -> list[tuple[str, str]]:
    if len(parity.accuracy) < 2:
        return []
    dense, *others = parity.accuracy
    shipped = next((each for each in others if each.model == shipped_link(parity).candidate), others[-1])
    shares = f"{percent_text(dense.accuracy, 1)} → {percent_text(shipped.accuracy, 1)}"
    return [(shares, f"accuracy, {dense.model} → {shipped.model}, {shipped.images:,} images")]


def headline_row(content: Content) -> SummaryRow | None:
    """Return the row of the preferred batch size, or else of the largest that ran on both sides."""
    if content.summary is None:
        return None
    ran = [row for row in content.summary.rows if row.speedup]
    preferred = [row for row in ran if row.batch == content.summary.preferred_batch_size]
    return max(preferred or ran, key=lambda row: row.batch, default=None)


def shipped_link(parity: Parity) -> Link:
    """Return the link from the dense model to the shipped artefact, at the first of several outputs."""
    return next((link for link in parity.links if link.kind == "whole"), parity.links[-1])
