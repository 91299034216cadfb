"""A parity proof on the terminal."""

from rich.table import Table

from perf.parity.parity import Parity


def _agreement(parity: Parity) -> str:
    """The column's name: of logits it is that of the first class."""
    return "top-1 agreement" if parity.compared == "logits" else "agreement"


def parity_table(parity: Parity) -> Table:
    """One row a link, then the structural tests that didn't pass."""
    table = Table("link", "against", "relative error", "max abs", "cosine", _agreement(parity), "verdict", "why")
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
            link.reason,
        )
    for finding in parity.structure:
        if finding.status != "PASS":
            table.add_row(finding.test, finding.candidate, "", "", "", "", finding.status, finding.reason)
    return table


def located_lines(parity: Parity) -> list[str]:
    """Where each failing FP16 link starts to err, and the command for it."""
    return [f"{each.link}: {each.site or 'no block'}: {each.reason} {each.command}" for each in parity.located]


def metric_lines(parity: Parity) -> list[str]:
    """Measures of the user's own, a line each."""
    return [f"{row.name} of {row.model}: {row.value:.6g}" for row in parity.metrics]
