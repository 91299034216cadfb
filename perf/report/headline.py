"""What stands on top of a report, in plain words: verdicts, one sentence, large numbers, where it was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from ground.ports import Role
from perf.parity.parity import Link, Parity
from perf.stats.summary import SummaryRow

from .content import Content
from .numbers import error, percent, signed_percent

SAME: Mapping[Role, str] = {
    "logits": "top answer",
    "token logits": "top answer of each token",
    "embedding": "nearest neighbour",
    "feature map": "nearest neighbour of each token",
    "score map": "answer at each pixel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLine:
    """A record's verdict in a report: `headline` names it with what was judged, `why` is what it rests on."""

    headline: str
    verdict: str
    why: str


def verdicts(content: Content) -> list[VerdictLine]:
    """Each record that has a verdict; none is computed here."""
    lines, gate = [], content.gate
    if gate.verdict is not None:
        unmet = [line.message for line in gate.rules if line.verdict != "PASS"]
        why = "; ".join(unmet) or f"all {len(gate.rules)} rules pass"
        lines.append(VerdictLine(headline=f"Gate {gate.verdict}", verdict=gate.verdict, why=why))
    if content.parity is not None:
        words = f"Parity {content.parity.verdict} ({content.parity.judged})"
        lines.append(VerdictLine(headline=words, verdict=content.parity.verdict, why=content.parity.reason))
    return lines


def lead(content: Content) -> str:
    """Speed and agreement in one sentence, and how much of the model was changed; empty when none is known."""
    clauses = []
    row = headline_row(content)
    if content.summary and row and row.speedup:
        names = content.summary.candidate, content.summary.reference
        clauses.append(f"{names[0]} is {row.speedup.value:.2f} times as fast as {names[1]} at batch {row.batch}")
    if content.parity:
        shipped = shipped_link(content.parity)
        m = shipped.measures
        if m.agreement is not None:
            same = f"the {SAME[shipped.role]} is the same on {percent(m.agreement)}"
            clauses.append(f"{same} of {m.images:,} {m.inputs}")
    sentence = " and ".join(clauses)
    merging = content.merging.sentences[:1] if content.merging else ()
    return " ".join(f"{words[:1].upper()}{words[1:]}." for words in (sentence, content.coverage, *merging) if words)


def where(content: Content) -> str:
    """Machine, backend and precision, images, day."""
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


def tiles(content: Content) -> list[tuple[str, str]]:
    """Up to four large numbers, each with what it is."""
    large = []
    row = headline_row(content)
    if row and row.speedup:
        times, bounds = row.speedup.describe().split(" ", 1)
        large.append((f"{times}×", f"speed-up at batch {row.batch} {bounds}"))
    if content.parity:
        shipped = shipped_link(content.parity)
        m = shipped.measures
        if m.agreement is None:
            large.append((error(m.relative_error), f"relative error, {m.images:,} {m.inputs}"))
        else:
            large.append((percent(m.agreement), f"same {SAME[shipped.role]}, {m.images:,} {m.inputs}"))
    if len(content.models) >= 2:
        dense, reduced = content.models[:2]
        costs = ("multiply-adds", dense.macs, reduced.macs), ("parameters", dense.params, reduced.params)
        large += [(signed_percent(after / before - 1, 0), what) for what, before, after in costs if before and after]
    return large


def headline_row(content: Content) -> SummaryRow | None:
    """The preferred batch size where one was found, else the largest that ran on both sides."""
    if content.summary is None:
        return None
    ran = [row for row in content.summary.rows if row.speedup]
    preferred = [row for row in ran if row.batch == content.summary.preferred_batch_size]
    chosen = preferred or ran
    return chosen[-1] if chosen else None


def shipped_link(parity: Parity) -> Link:
    """From the dense model to what ships; of several outputs the first."""
    return next((link for link in parity.links if link.kind == "whole"), parity.links[-1])
