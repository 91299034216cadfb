"""What the gate judged, on the terminal."""

from rich.table import Table

from perf.gate.gate import Gate


def gate_table(gate: Gate) -> Table:
    """One row a rule."""
    table = Table("fails if", "verdict", "why")
    for rule in gate.rules:
        table.add_row(rule.rule, rule.verdict, rule.message)
    return table
