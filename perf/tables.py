"""The tables of a report as plain cells, made once and written as HTML, Markdown or CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .parity import Link
from .stats import Interval, Percentile
from .story import ModelLine, Story
from .summary import Side, SummaryRow

NOTHING = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`key` is a short name for files and anchors; the first column holds the row's name."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), (self.key, self.columns, self.rows)


def tables(story: Story) -> list[Table]:
    """Every table that the story has rows for, in reading order."""
    made = [
        models(story),
        effects(story),
        latency(story),
        gate(story),
        links(story),
        structure(story),
        located(story),
        shift(story),
        accuracy(story),
        sites(story),
        pairs("environment", "Environment", story.environment),
        pairs("lineage", "Lineage", story.lineage),
    ]
    return [table for table in made if table.rows]


def models(story: Story) -> Table:
    """One column a model, one row a property; a last column compares the first two models."""
    lines = story.models
    rows = [
        ("Parameters", lambda m: m.params, count),
        ("Multiply-adds", lambda m: m.macs, count),
        ("File size", lambda m: m.size_bytes, size),
        ("Accuracy", lambda m: m.accuracy, percent),
        ("Top-1 agreement with dense", lambda m: m.agreement, percent),
    ]  # fmt: skip
    known = [_property(name, get, show, lines) for name, get, show in rows]
    return Table(
        key="models",
        title="Dense beside reduced",
        columns=("", *(m.name for m in lines), *(("Change",) if len(lines) == 2 else ())),
        rows=tuple(row for row in known if any(cell != NOTHING for cell in row[1:])) if lines else (),
    )


def _property(
    name: str,
    get: Callable[[ModelLine], float | None],
    show: Callable[[float | None], str],
    lines: tuple[ModelLine, ...],
) -> tuple[str, ...]:
    values = [get(line) for line in lines]
    cells = (name, *(show(value) for value in values))
    if len(lines) != 2:
        return cells
    before, after = values
    if before is None or after is None:
        return (*cells, NOTHING)
    points = name == "Accuracy"
    return (
        *cells,
        f"{100 * (after - before):+.2f} points" if points else f"{after / before - 1:+.1%}" if before else NOTHING,
    )


def effects(story: Story) -> Table:
    """What the compensation changed, at the same widths."""
    return Table(
        key="effects",
        title="What the compensation changed",
        columns=("Preset", "Relative logit error", "Agreement", "Accuracy"),
        rows=tuple(
            (e.preset, error(e.relative_error), percent(e.agreement), percent(e.accuracy)) for e in story.effects
        ),
        note="Same widths, same images; without compensation the channels are only cut.",
    )


def latency(story: Story) -> Table:
    """One row for each measure, batch and subject, failed ones included."""
    summary = story.summary
    rows = [] if summary is None else [*summary.rows, *summary.end_to_end_rows]
    lines = [_latency_line(row, side, first=i == 0) for row in rows for i, side in enumerate(row.sides.values())]
    return Table(
        key="latency",
        title="Latency and throughput",
        columns=(
            "Batch",
            "Measure",
            "Model",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "images/s",
            "Speed-up",
            "A/A noise",
            "Of promised",
        ),
        rows=tuple(lines),
        note="Speed-up is the ratio of medians with its 95 % interval; A/A is the dense model against itself on the "
        "same machine in the same run. The promise is what the multiply-adds saved would give.",
    )


def _latency_line(row: SummaryRow, side: Side, *, first: bool) -> tuple[str, ...]:
    head = (str(row.batch), row.measure.replace("_", " "), side.name)
    if side.status != "ok":
        return (*head, side.status, *([NOTHING] * 6))
    times = (interval(side.p50_ms), tail(side.p90_ms), tail(side.p99_ms), interval(side.throughput, digits=4))
    if first:
        return (*head, *times, "", "", "")
    share = NOTHING if row.realised_share is None else f"{row.realised_share:.0%}"
    return (*head, *times, ratio(row.speedup), ratio(row.noise), share)


def gate(story: Story) -> Table:
    """The gate's rules as judged."""
    rows = tuple((line.rule, line.verdict, line.message) for line in story.gate)
    return Table(key="gate", title="Gate", columns=("Rule", "Verdict", "Why"), rows=rows)


def links(story: Story) -> Table:
    """The parity chain, one row a link."""
    chain = story.parity.links if story.parity else ()
    return Table(
        key="parity",
        title="Parity chain",
        columns=("Link", "Status", "Relative error", "Allowed", "Max abs", "Cosine, least", "Top-1 agreement",
                 "Top-5 overlap", "KL, mean", "Decisive flips", "Why"),
        rows=tuple(_link_cells(link) for link in chain),
        note="Errors of the logits on real images, at the worst batch size. A decisive flip changes the answer on an "
        "image whose margin exceeds the noise.",
    )  # fmt: skip


def _link_cells(link: Link) -> tuple[str, ...]:
    m = link.measures
    agreement = f"{percent(m.top1_agreement)} ({m.top1_agreement_low:.1%} to {m.top1_agreement_high:.1%})"
    return (
        f"{link.reference} → {link.candidate}",
        link.status,
        error(m.relative_error),
        error(link.tolerance.max_relative_error),
        error(m.max_abs),
        f"{m.cosine_min:.6f}",
        agreement,
        percent(m.top5_overlap),
        error(m.kl_mean),
        f"{m.decisive_flips} of {m.decisive_images}",
        link.reason,
    )


def structure(story: Story) -> Table:
    """Structural tests."""
    found = story.parity.structure if story.parity else ()
    rows = tuple((f"{f.test} of {f.candidate}", f.status, f.reason) for f in found)
    return Table(key="structure", title="Structural tests", columns=("Test", "Status", "What was seen"), rows=rows)


def located(story: Story) -> Table:
    """Where failing links break."""
    rows = tuple(
        (line.site or "no single site", line.link, line.reason, line.command)
        for line in (story.parity.located if story.parity else ())
    )
    return Table(key="located", title="Where it breaks", columns=("Site", "Link", "What was seen", "Mend"), rows=rows)


def shift(story: Story) -> Table:
    """Do these images look like the calibration images?"""
    found = story.parity.shift if story.parity else None
    return Table(
        key="shift",
        title="Images against calibration",
        columns=("Site", "Status", "Mean distance", "by chance", "Covariance distance", "by chance"),
        rows=tuple(
            (s.site, s.status, *map(error, (s.mean_distance, s.mean_noise, s.covariance_distance, s.covariance_noise)))
            for s in (found.sites if found else ())
        ),
        note=found.reason if found else "",
    )


def accuracy(story: Story) -> Table:
    """Accuracy on labels, and McNemar's test where two models were compared."""
    parity = story.parity
    rows = [(a.model, f"{percent(a.accuracy)} ({a.low:.1%} to {a.high:.1%})", f"{a.correct} of {a.images}")
            for a in (parity.accuracy if parity else ())]  # fmt: skip
    rows += [(f"{c.a} against {c.b}", f"p = {c.p_value:.2g}", f"{c.only_a} against {c.only_b} right alone")
             for c in (parity.comparisons if parity else ())]  # fmt: skip
    return Table(key="accuracy", title="Accuracy on labels", columns=("Model", "Accuracy", "Images"), rows=tuple(rows),
                 note="95 % Wilson intervals; two models on the same images by McNemar's exact test.")  # fmt: skip


def sites(story: Story) -> Table:
    """Widths and residuals of every site."""
    return Table(
        key="sites",
        title="Sites",
        columns=("Site", "Width, dense", "Width, reduced", "Error, only cut", "Error, compensated"),
        rows=tuple(
            (s.site, s.width_dense, s.width_reduced, error(s.error_uncompensated), error(s.error)) for s in story.sites
        ),
    )


def pairs(key: str, title: str, values: Mapping[str, str]) -> Table:
    """A flat mapping as a table."""
    return Table(key=key, title=title, columns=("Key", "Value"), rows=tuple(values.items()))


def count(value: float | None) -> str:
    """5.72 M, 1.25 G."""
    if value is None:
        return NOTHING
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:g}"


def size(value: float | None) -> str:
    """In MB or kB of 1000."""
    if value is None:
        return NOTHING
    return f"{value / 1e6:.3g} MB" if value >= 1e6 else f"{value / 1e3:.3g} kB"


def percent(value: float | None) -> str:
    """Two decimals, and never rounded up to 100 %."""
    if value is None:
        return NOTHING
    return "100 %" if value == 1 else f"{min(value, 0.9999):.2%}".replace("%", " %")


def error(value: float | None) -> str:
    """Two digits that count."""
    if value is None:
        return NOTHING
    return f"{value:.2g}" if math.isfinite(value) else "not finite"


def interval(value: Interval | None, digits: int = 3) -> str:
    """The value; its interval is in the plot."""
    return NOTHING if value is None else f"{value.value:.{digits}g}"


def tail(value: Percentile | None) -> str:
    """A percentile, or the dash where too few samples were taken."""
    return NOTHING if value is None or value.value is None else f"{value.value:.3g}"


def ratio(value: Interval | None) -> str:
    """1.42 (1.40 to 1.44)."""
    if value is None:
        return NOTHING
    bounds = f" ({value.low:.2f} to {value.high:.2f})" if math.isfinite(value.high) else " (too few rounds)"
    return f"{value.value:.2f}{bounds}"
