"""A parity proof, and the verdicts of a gate, on the terminal."""

from rich.console import RenderableType
from rich.table import Table

from ground.quantity import format_number
from perf.gate.gate import Gate
from perf.parity.parity import Parity

from .console import long_reasons, reason_cell


def parity_table(parity: Parity) -> Table:
    agreement = "top-1 agreement" if parity.compared == "logits" else "agreement"
    table = Table("link", "against", "relative error", "max abs", "cosine", agreement, "verdict")
    for column in table.columns[:2]:
        column.overflow = "fold"  # names are whole
    for link in parity.links:
        errors = link.measures
        table.add_row(
            f"{link.name} ({link.kind})",
            link.reference,
            f"{errors.relative_error:.2e}",
            f"{errors.max_abs:.2e}",
            f"{errors.cosine_mean:.6f}",
            "" if errors.agreement is None else f"{errors.agreement:.2%}",
            link.status,
        )
    for finding in parity.structure:
        if finding.status != "PASS":
            table.add_row(finding.test, finding.candidate, "", "", "", "", finding.status)
    return table


def parity_shown(parity: Parity) -> list[RenderableType]:
    """Return the table of links and, below it, reasons, accuracies, sources of engines, failing blocks and metrics."""
    every = [(link.name, link.reason) for link in parity.links]
    every += [(f"{each.test} of {each.candidate}", each.reason) for each in parity.structure if each.status != "PASS"]
    reasons = [f"{name}: {reason}" for name, reason in every if reason]
    return [
        parity_table(parity),
        *(line for line in reasons if line not in parity.reason),
        *parity.accuracy_lines,
        *(source.line for source in parity.sources),
        *(f"{each.link}: {each.site or 'no block'}: {each.reason} {each.command}" for each in parity.located),
        *(f"{row.name} of {row.model}: {format_number(row.value, 6)}" for row in parity.metrics),
    ]


def gate_shown(gate: Gate) -> list[RenderableType]:
    table = Table("fails if", "verdict", "why")
    for rule in gate.rules:
        table.add_row(rule.rule, rule.verdict, reason_cell(rule.message))
    return [table, *long_reasons((rule.rule, rule.message) for rule in gate.rules)]
