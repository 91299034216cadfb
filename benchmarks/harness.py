"""Rows that are measured one by one and kept in a JSON record, from which pages make tables.

    @measures("benchmarks/bf16")
    @click.option("--count", default=64)
    def main(bench: Bench, count: int) -> None:
        '''Measure each precision.'''
        bench.share(images=count)
        for precision in PRECISIONS:
            bench.row({"precision": precision}, figures, precision)  # calls figures(precision) for the other fields

A run continues a record: rows in it are measured again only with `--again`. `--only` chooses rows by values of their
keys. `benchmarks/pages/markdown.py` makes tables.
"""

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from corp_deploy.machine import versions
from ground.errors import BadInput, Missing
from ground.files import write_json
from ground.records import record_from_file
from perf.timing.watch import cpu_name

Row = dict[str, Any]
REMEDY = "choose another --output, or measure all rows anew with --again"


def _has_key(row: Row, key: Mapping[str, Any]) -> bool:
    return all(row[name] == value for name, value in key.items())


class Record:
    """Facts that all rows share, and lists of rows; the file is written after each change."""

    def __init__(self, path: Path, kind: str, facts: Mapping[str, Any], *, anew: bool = False) -> None:
        self.path = path
        self.before: dict[str, Any] = {}
        if path.is_file() and not anew:
            self.before = record_from_file(path, dict[str, Any], kind=kind, remedy=REMEDY)
        self.content: dict[str, Any] = {"kind": kind, "version": 1, **self.before}
        self.share(**facts)

    def share(self, **facts: Any) -> None:
        """Add facts that all rows share. Raises BadInput if rows were measured with other facts."""
        if self.before and (other := [name for name, value in facts.items() if self.before.get(name) != value]):
            raise BadInput(f"{self.path}: its rows were measured with another {', '.join(other)}; {REMEDY}")
        self.content |= facts

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def has(self, part: str, key: Mapping[str, Any]) -> bool:
        """Return whether there is a row of this key."""
        return any(_has_key(row, key) for row in self.content.get(part, ()))

    def row(self, part: str, key: Mapping[str, Any]) -> Row:
        """Return the first row of this key. Raises LookupError if there is none."""
        rows: list[Row] = self.content.get(part, [])
        try:
            return next(row for row in rows if _has_key(row, key))
        except StopIteration:
            raise LookupError(f"no row of {part} has {dict(key)}") from None

    def put(self, part: str, row: Row, key: Sequence[str]) -> None:
        """Replace the row that has the same key, or append this one."""
        rows: list[Row] = self.content.setdefault(part, [])
        for position, each in enumerate(rows):
            if all(each[name] == row[name] for name in key):
                rows[position] = row
                break
        else:
            rows.append(row)
        self.write()

    def order(self, part: str, name: str, values: Sequence[str]) -> None:
        """Sort rows by the position of their value in `values`, those of other values last."""
        places = {value: place for place, value in enumerate(values)}
        self.content[part].sort(key=lambda row: places.get(row[name], len(places)))
        self.write()

    def set(self, name: str, value: Any) -> None:
        """Write an entry that is no row."""
        self.content[name] = value
        self.write()

    def write(self) -> None:
        write_json(self.path, self.content)


class Bench:
    """The record of a run, and the choice of its rows."""

    def __init__(self, record: Record, only: Sequence[str] = (), again: bool = False) -> None:
        self.record, self.only, self.again = record, only, again

    def share(self, **facts: Any) -> None:
        """Add facts that all rows share, as Record.share."""
        self.record.share(**facts)

    def wanted(self, key: Mapping[str, Any], part: str = "rows") -> bool:
        """Return whether to make the row of this key: `--only` chooses it, and it is absent or `--again` is given."""
        values = [str(value) for value in key.values()]
        if self.only and not any(fnmatch.fnmatchcase(value, each) for value in values for each in self.only):
            return False
        return self.again or not self.record.has(part, key)

    def row(
        self, key: Mapping[str, Any], make: Callable[..., Mapping[str, Any]], *arguments: Any, part: str = "rows"
    ) -> None:
        """Make and write the row of this key if it is wanted; `make(*arguments)` returns its other fields.

        If a package or a device is absent, the reason is printed and no row is written.
        """
        if not self.wanted(key, part):
            return
        name = ", ".join(str(value) for value in key.values())
        try:
            row = {**key, **make(*arguments)}
        except Missing as reason:
            click.echo(f"{name}: skipped, {reason}", err=True)
            return
        self.record.put(part, row, tuple(key))
        shown = (
            f"{field} {value:.4g}" for field, value in row.items() if isinstance(value, float) and field not in key
        )
        click.echo(f"{name}: {', '.join(shown)}")


def measures(kind: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function that takes a Bench and further options."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.command()
        @click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
        @click.option(
            "--only", multiple=True, metavar="PATTERN", help="Make only rows with a matching value in their key."
        )
        @click.option("--again", is_flag=True, help="Make rows again that the record already has.")
        @functools.wraps(function)
        def command(*, output: Path, only: tuple[str, ...], again: bool, **options: Any) -> None:
            facts = {"cpu": cpu_name(), "versions": versions()}
            try:
                record = Record(output, kind, facts, anew=again and not only)
                function(Bench(record, only, again), **options)
            except BadInput as error:
                raise click.ClickException(str(error)) from None

        return command

    return decorate
