"""corp-deploy doctor."""

import click

from ..console import Output, output_options


@click.command()
@output_options
def doctor(out: Output) -> None:
    """Show what this machine has and which command each lack disables.

    Example: corp-deploy doctor --json
    """
    from rich.table import Table

    from ..machine import record

    found = record()
    table = Table("what", "found", "its lack disables", "remedy")
    for row in found["findings"]:
        table.add_row(row["what"], row["found"] or "[red]absent[/red]", row["disables"], row["remedy"])
    out.result(found, table)
