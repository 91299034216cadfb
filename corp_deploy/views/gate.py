"""What the gate judged, on the terminal."""

from rich.console import RenderableType
from rich.table import Table

from perf.gate.gate import Gate

from .reasons import reason_cell, reasons_below


def gate_shown(gate: Gate) -> list[RenderableType]:
    """One row a rule, and below what is too long for a cell."""
    table = Table("fails if", "verdict", "why")
    for rule in gate.rules:
        table.add_row(rule.rule, rule.verdict, reason_cell(rule.message))
    return [table, *reasons_below((rule.rule, rule.message) for rule in gate.rules)]
