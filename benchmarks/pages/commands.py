"""Which page of the reference has which command, as a table with what each one does."""

import re
from pathlib import Path

from benchmarks.markdown import table
from corp_deploy.cli import main

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference" / "commands"
_SHOWN = re.compile(r":prog_name: corp-deploy ([\w-]+)$", re.MULTILINE)


def pages_of_commands() -> dict[str, list[str]]:
    """The commands that each page shows, by its name."""
    return {page.name: _SHOWN.findall(page.read_text(encoding="utf-8")) for page in sorted(PAGES.glob("*.md"))}


def commands() -> str:
    """The table of all commands, in the order in which `corp-deploy --help` has them."""
    at = {command: page for page, shown in pages_of_commands().items() for command in shown}
    rows = [
        (f"[`{name}`]({at[name]}#corp-deploy-{name})", command.get_short_help_str(150))
        for name, command in main.commands.items()
    ]
    return table(("command", "what it does"), rows)
