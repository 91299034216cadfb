"""The output of commands: results on stdout (tables or JSON), progress, notes and warnings on stderr.

A table shows a reason of at most MOST characters; a longer one is printed below it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ground.text import printable

from .waiting import Waiting

WIDTH_WITHOUT_TERMINAL = 110


class _Console(Console):
    """A console that escapes control characters in every text."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def _console(*, stderr: bool) -> Console:
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console


class _Count(MofNCompleteColumn):
    """A column that is empty while the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A progress bar, called with the number of finished units and, if it wasn't known before, of all units."""

    progress: Progress
    task: TaskID

    def __call__(self, count: int, total: int | None = None) -> None:
        self.progress.update(self.task, completed=count, total=total)

    def renamed(self, title: str, count: int, total: int, unit: str) -> None:
        self.progress.update(self.task, description=printable(title), completed=count, total=total, unit=unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The printer of a command's results, notes, warnings and progress."""

    json: bool
    quiet: bool
    waiting: Waiting = field(default_factory=Waiting)

    def result(self, record: Mapping[str, Any], *shown: RenderableType) -> None:
        """Print the record as JSON with --json, and otherwise, unless quiet, the renderables made for people."""
        self.waiting.restart()
        if self.json:
            click.echo(json.dumps(record, indent=2, allow_nan=False))
        elif not self.quiet:
            for item in shown:
                # A line of text stays one line, so that its path or command can be copied and searched for.
                _console(stderr=False).print(item, soft_wrap=isinstance(item, str))

    def note(self, text: str) -> None:
        self.waiting.restart()
        if not (self.quiet or self.json):
            click.echo(printable(text), err=True)

    def warn(self, text: str) -> None:
        """Print a line even with --quiet: it changes the meaning of the result."""
        self.waiting.restart()
        click.echo(printable(f"warning: {text}"), err=True)

    @contextmanager
    def progress(self, title: str, total: int | None, *, unit: str = "") -> Iterator[Bar]:
        """Show a bar on stderr, unless quiet; yield it, to be called with the number of finished units."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Count(),
            TextColumn("{task.fields[unit]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with self.waiting.bar(), Progress(*columns, console=_console(stderr=True), disable=self.quiet) as bar:
            yield Bar(progress=bar, task=bar.add_task(printable(title), total=total, unit=unit))


MOST = 40
"""The most characters of a reason within a table."""


def reason_cell(reason: str) -> str:
    return reason if len(reason) <= MOST else "read below"


def long_reasons(named: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name}: {reason}" for name, reason in named if len(reason) > MOST]


def machine_table(record: Mapping[str, Any]) -> Table:
    table = Table("what", "found", "its lack disables")
    table.add_column("remedy", no_wrap=True, overflow="fold")  # a command is one line, to be copied
    for row in record["findings"]:
        table.add_row(row["what"], row["found"] or Text("absent", style="red"), row["disables"], row["remedy"])
    return table
