"""corp-deploy doctor."""

import click

from corp_deploy.views.console import Output, output_options


@click.command()
@output_options
def doctor(out: Output) -> None:
    """Show what this machine has and which command each lack disables.

    Example: corp-deploy doctor --json
    """
    from rich.table import Table
    from rich.text import Text

    from corp_deploy.machine import record

    found = record()
    table = Table("what", "found", "its lack disables")
    table.add_column("remedy", no_wrap=True, overflow="fold")  # a command is one line, to be copied
    for row in found["findings"]:
        table.add_row(row["what"], row["found"] or Text("absent", style="red"), row["disables"], row["remedy"])
    out.result(found, table)
