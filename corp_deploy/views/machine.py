"""What this machine has, on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text


def machine_table(record: Mapping[str, Any]) -> Table:
    """One row a thing that commands need, with the command that installs it."""
    table = Table("what", "found", "its lack disables")
    table.add_column("remedy", no_wrap=True, overflow="fold")  # a command is one line, to be copied
    for row in record["findings"]:
        table.add_row(row["what"], row["found"] or Text("absent", style="red"), row["disables"], row["remedy"])
    return table
