"""What stands on top of a report, in plain words: verdicts, one sentence, large numbers, where it was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perf.stats.summary import SummaryRow

from .content import Content
from .numbers import percent, signed_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A record's verdict as it stands in a report: `words` name it with what was judged, `why` is what it rests on."""

    words: str
    verdict: str
    why: str


def verdicts(story: Content) -> list[Stated]:
    """Each record that has a verdict; none is computed here."""
    found = []
    if story.gate_verdict is not None:
        unmet = [line.message for line in story.gate if line.verdict != "PASS"]
        why = "; ".join(unmet) or f"all {len(story.gate)} rules pass"
        found.append(Stated(words=f"Gate {story.gate_verdict}", verdict=story.gate_verdict, why=why))
    if story.parity is not None:
        words = f"Parity {story.parity.verdict} ({story.parity.judged})"
        found.append(Stated(words=words, verdict=story.parity.verdict, why=story.parity.reason))
    return found


def lead(story: Content) -> str:
    """The facts in one sentence, and how much of the model was changed; empty when neither is known."""
    facts = []
    row = headline_row(story)
    if story.summary and row and row.speedup:
        names = story.summary.candidate, story.summary.reference
        facts.append(f"{names[0]} is {row.speedup.value:.2f} times as fast as {names[1]} at batch {row.batch}")
    if story.parity:
        agreement, images = agreement_of(story)
        facts.append(f"the top answer is the same on {percent(agreement)} of {images:,} images")
    sentence = " and ".join(facts)
    return " ".join(f"{said[:1].upper()}{said[1:]}." for said in (sentence, story.coverage) if said)


def where(story: Content) -> str:
    """Machine, backend and precision, images, day."""
    parts = []
    if story.bench:
        machine, described = story.bench.environment, story.bench.candidate.describe
        parts.append(str(machine.get("gpu") or machine.get("cpu") or ""))
        parts.append(" ".join(str(described[key]) for key in ("backend", "precision") if described.get(key)))
    if story.parity:
        images = story.parity.images
        parts.append(f"{images.count:,} {'random inputs' if images.kind == 'random' else 'images'}")
    if story.bench:
        parts.append(story.bench.created[:10])
    return " · ".join(part for part in parts if part)


def tiles(story: Content) -> list[tuple[str, str]]:
    """Up to four large numbers, each with what it is."""
    found = []
    row = headline_row(story)
    if row and row.speedup:
        known = math.isfinite(row.speedup.high)
        bounds = f"{row.speedup.low:.2f} to {row.speedup.high:.2f}" if known else "too few rounds"
        found.append((f"{row.speedup.value:.2f}×", f"speed-up at batch {row.batch} ({bounds})"))
    if story.parity:
        agreement, images = agreement_of(story)
        found.append((percent(agreement), f"same top answer, {images:,} images"))
    if len(story.models) >= 2:
        dense, reduced = story.models[:2]
        costs = ("multiply-adds", dense.macs, reduced.macs), ("parameters", dense.params, reduced.params)
        found += [(signed_percent(after / before - 1, 0), what) for what, before, after in costs if before and after]
    return found


def headline_row(story: Content) -> SummaryRow | None:
    """The preferred batch size where one was found, else the largest that ran on both sides."""
    if story.summary is None:
        return None
    ran = [row for row in story.summary.rows if row.speedup]
    preferred = [row for row in ran if row.batch == story.summary.preferred_batch_size]
    chosen = preferred or ran
    return chosen[-1] if chosen else None


def agreement_of(story: Content) -> tuple[float, int]:
    """Top-1 agreement of what ships with the dense model, and the number of images."""
    assert story.parity is not None
    link = next((link for link in story.parity.links if link.kind == "whole"), story.parity.links[-1])
    return link.measures.top1_agreement, link.measures.images
