"""Tables of a report, each from one part of its content."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import shorten
from typing import Any

from perf.stats.summary import MOST_GAIN, SubjectSummary, SummaryRow

from .content import (
    BudgetLine,
    Content,
    EffectLine,
    EffortLine,
    GateLine,
    MergingLines,
    ModelLine,
    SiteLine,
    flat_texts,
)
from .curves import images_table
from .history import history_table
from .numbers import (
    NOTHING,
    PAIR,
    ReportTable,
    count_text,
    error_text,
    number_text,
    percent_text,
    points_text,
    ratio_text,
    signed_percent,
    size_text,
    value_text,
)
from .parity_tables import PARITY_TABLES

JOULES = "Joules/image"
MOST_WHY = 100
"""Characters of a reason that fit in the gate's table in a window of 1,280 pixels."""


def build_tables(content: Content) -> dict[str, ReportTable]:
    """Return the tables that have rows, by key, in reading order."""
    summary, size = content.summary, content.calibration_size
    parts: list[tuple[Callable[[Any], ReportTable], Any]] = [
        (models_table, content.models),
        (effects_table, content.effects),
        (partial(latency_rows_table, "latency", "Latency and throughput"), summary and summary.rows),
        (
            partial(latency_rows_table, "end_to_end", "With copies to and from the device"),
            summary and summary.end_to_end_rows,
        ),
        (energy_table, summary and [row for row in summary.rows if row.energy is not None]),
        (gate_table, content.gate.rules),
        (history_table, content.history),
        (partial(images_table, sentence=size.sentence if size else ""), size and size.points),
        *((table, content.parity) for table in PARITY_TABLES),
        (budgets_table, content.ways),
        (merging_table, content.merging),
        (sites_table, content.sites),
        (effort_table, content.effort),
        (partial(pairs_table, "environment", "Environment"), content.bench and content.bench.environment),
        (partial(pairs_table, "lineage", "Lineage"), content.lineage),
    ]
    every = [table_of(part) for table_of, part in parts if part]
    return {table.key: table for table in every if table.rows}


def models_table(lines: Sequence[ModelLine]) -> ReportTable:
    cells = [
        _model_row("Parameters", [line.params for line in lines], count_text),
        _model_row("Multiply-adds", [line.macs for line in lines], count_text),
        _model_row("File size", [line.size_bytes for line in lines], size_text),
        _model_row("Device memory", [line.device_memory_bytes for line in lines], size_text),
        _model_row("Accuracy", [line.accuracy for line in lines], percent_text),
        _model_row("Agreement", [line.agreement for line in lines], percent_text),
    ]
    return ReportTable(
        key="models",
        title="Dense beside reduced",
        columns=("", *(m.name for m in lines), *(("Change",) if len(lines) == 2 else ())),
        rows=tuple(row for row in cells if any(cell != NOTHING for cell in row[1:])),
    )


def _model_row(name: str, values: Sequence[float | None], show: Callable[[float | None], str]) -> tuple[str, ...]:
    cells = (name, *map(show, values))
    if len(values) != 2:
        return cells
    before, after = values
    if not before or after is None or name == "Agreement":
        return (*cells, NOTHING)
    return (*cells, points_text(after - before) if name == "Accuracy" else signed_percent(after / before - 1))


def effects_table(lines: Sequence[EffectLine]) -> ReportTable:
    return ReportTable(
        key="effects",
        title="What the compensation changed",
        columns=("Preset", "Logit error", "Agreement", "Accuracy"),
        rows=tuple(
            (e.preset, error_text(e.relative_error), percent_text(e.agreement), percent_text(e.accuracy)) for e in lines
        ),
        note="Same widths and images; preset none only removes the channels.",
    )


def latency_rows_table(key: str, title: str, rows: Sequence[SummaryRow]) -> ReportTable:
    """Return a table with a row per batch, reference → candidate; failed subjects stay in the table."""
    measure = rows[0].measure.replace("_", " ")
    needed = next((p.needed for row in rows for s in row.sides.values() if (p := s.p99_ms) and p.value is None), None)
    note = f"Times of one call ({measure}), dense → reduced. Speed-up is the ratio of medians with its 95 % interval, "
    note += "A/A noise the dense model against itself in the same run, and realised the time saved over the "
    note += "multiply-adds saved."
    note += f" A p99 needs {needed} samples." if needed else ""
    note += _repeats_note(rows)
    note += "".join(f" Batch {row.batch}, {row.launches.sentence}." for row in rows if row.launches)
    spent = [_joules_cell(row) for row in rows] if any(row.energy for row in rows) else None
    columns: tuple[str, ...] = (
        "Batch",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "Images/s",
        "Peak memory",
        "Speed-up",
        "A/A noise",
        "Realised",
    )
    cells: list[tuple[str, ...]] = [_latency_cells(row) for row in rows]
    if spent is not None:
        columns = (*columns[:5], JOULES, *columns[5:])
        cells = [(*row[:5], joules, *row[5:]) for row, joules in zip(cells, spent, strict=True)]
    return ReportTable(key=key, title=title, columns=columns, rows=tuple(cells), note=note)


def energy_table(rows: Sequence[SummaryRow]) -> ReportTable:
    found = [(row, row.energy) for row in rows if row.energy is not None]
    cells = [
        (f"{row.batch}\nthrottled" if energy.throttled else str(row.batch), _joules_cell(row), ratio_text(energy.ratio),
         ratio_text(energy.noise), number_text(energy.idle_w), str(energy.rounds))
        for row, energy in found
    ]  # fmt: skip
    return ReportTable(
        key="energy",
        title="Energy",
        columns=("Batch", JOULES, "Dense over reduced", "A/A noise", "Idle W", "Rounds"),
        rows=tuple(cells),
        note=f"By {found[0][1].sensor}. The power of the idle machine, measured before and after, is subtracted. A/A "
        "noise is the dense model against itself in the same rounds.",
    )


def _joules_cell(row: SummaryRow) -> str:
    return _join_sides(tuple(row.sides.values()), lambda side: value_text(row.joules(side.name)))


def _repeats_note(rows: Sequence[SummaryRow]) -> str:
    gains = [(gain, name, row.batch) for row in rows for name, gain in row.repeats.items()]
    if not gains:
        return ""
    gain, name, batch = max(gains, key=lambda each: each[0].value)
    return (
        " Each was also timed on one repeated batch against varied ones, which reveals answers out of a cache: at most "
        f"{ratio_text(gain)} times as fast ({name}, batch {batch}; {MOST_GAIN:g} is allowed)."
    )


def _latency_cells(row: SummaryRow) -> tuple[str, ...]:
    sides = tuple(row.sides.values())
    failed = ", ".join(dict.fromkeys(side.message for side in sides if side.status != "ok" and side.message))
    quality = row.mark or failed
    return (
        f"{row.batch}\n{quality}" if quality else str(row.batch),
        _join_sides(sides, lambda side: value_text(side.p50_ms) if side.status == "ok" else side.status),
        _join_sides(sides, lambda side: value_text(side.p90_ms)),
        _join_sides(sides, lambda side: value_text(side.p99_ms)),
        _join_sides(sides, lambda side: value_text(side.throughput)),
        _join_sides(sides, lambda side: size_text(side.peak_memory_bytes)),
        ratio_text(row.speedup),
        ratio_text(row.noise),
        NOTHING if row.realised_share is None else percent_text(row.realised_share, 0),
    )


def _join_sides(sides: tuple[SubjectSummary, ...], show: Callable[[SubjectSummary], str]) -> str:
    cells = [show(side) for side in sides]
    return cells[0] if len(set(cells)) == 1 and not cells[0][0].isdigit() else " → ".join(cells)


def gate_table(rules: Sequence[GateLine]) -> ReportTable:
    return ReportTable(
        key="gate",
        title="Gate",
        columns=("Rule", "Verdict", "Why"),
        rows=tuple((line.rule, line.verdict, shorten(line.message, MOST_WHY, placeholder=" …")) for line in rules),
        note="Shortened reasons are complete beside the gate's verdict.",
    )


def budgets_table(lines: Sequence[BudgetLine]) -> ReportTable:
    return ReportTable(
        key="ways",
        title="Ways to spend the budget",
        columns=("Widths", "Share of the dense cost", "Logit error, predicted", "Measured", "Median image"),
        rows=tuple(
            (w.name, percent_text(w.share), *map(error_text, (w.predicted_error, w.measured_error, w.median_error)))
            for w in lines
        ),
        note="Measured on a few calibration images, without labels and held-out images.",
    )


def merging_table(lines: MergingLines) -> ReportTable:
    return ReportTable(
        key="merging",
        title="Tokens by block",
        columns=("Block", "Tokens that enter", lines.verb.capitalize(), "Tokens that leave"),
        rows=tuple((f"block {block}", *map(count_text, rest)) for block, *rest in lines.blocks),
        note=" ".join(f"{words[:1].upper()}{words[1:]}." for words in lines.sentences[1:]),
    )


JUDGED_COLUMNS = {
    "Held out": "error_held_out",
    "Stream error": "stream_error",
    "Stream error, held out": "stream_error_held_out",
}


def sites_table(lines: Sequence[SiteLine]) -> ReportTable:
    judged = {
        column: name
        for column, name in JUDGED_COLUMNS.items()
        if any(getattr(line, name) is not None for line in lines)
    }
    return ReportTable(
        key="sites",
        title="Sites",
        columns=("Site", "Width, dense", "Width, reduced", "Error, uncompensated", "Error, compensated", *judged),
        rows=tuple(
            (s.site, s.width_dense, s.width_reduced, error_text(s.error_uncompensated), error_text(s.error),
             *(error_text(getattr(s, name)) for name in judged.values()))
            for s in lines
        ),
        note="An error on held-out images far above the one beside it shows over-fitting." if judged else "",
    )  # fmt: skip


def pairs_table(key: str, title: str, values: Mapping[str, Any]) -> ReportTable:
    return ReportTable(key=key, title=title, columns=PAIR, rows=tuple(flat_texts(values).items()))


MEASURES = ("seconds", "peak_bytes", "device_peak_bytes")


def effort_table(lines: Sequence[EffortLine]) -> ReportTable:
    machines = list(dict.fromkeys(_machine_name(line) for line in lines if line.machine))
    several = len(machines) > 1
    rows = [
        (
            line.step,
            "not recorded" if line.seconds is None else number_text(line.seconds),
            size_text(line.peak_bytes),
            size_text(line.device_peak_bytes),
            *[_machine_name(line)] * several,
        )
        for line in lines
    ]
    measured_s = [line.seconds for line in lines if line.seconds is not None]
    if len(measured_s) == len(lines) > 1:
        peaks = [max((each for line in lines if (each := getattr(line, name))), default=None) for name in MEASURES[1:]]
        rows.append(("all together", number_text(sum(measured_s)), *map(size_text, peaks), *[""] * several))
    note = "" if several or not machines else f"On {machines[0]}. "
    note += "Figures are those of the run that made a step's files; a step that was not run again keeps its older "
    note += "figures. Memory is all memory of the process, and torch's memory on the GPU."
    columns = ("Step", "Seconds", "Peak memory", "Peak on the GPU", *["Machine"] * several)
    return ReportTable(
        key="effort", title="Time and memory", columns=columns, rows=tuple(rows), note=note if rows else ""
    )


def _machine_name(line: EffortLine) -> str:
    return f"{line.machine}, {line.gpu}" if line.gpu else line.machine
