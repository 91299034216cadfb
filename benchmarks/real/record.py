"""A record of rows: written whole after each, so that a later run goes on where this one ended."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ground.errors import BadInput
from ground.files import write_json
from ground.records import record_from_file

Row = dict[str, Any]
REMEDY = "choose another --output, or delete it to measure all anew"


def _has_key(row: Row, key: Mapping[str, Any]) -> bool:
    return all(row[name] == value for name, value in key.items())


class Record:
    """A setting that all rows share, and lists of rows by key."""

    def __init__(self, path: Path, kind: str, setting: Mapping[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"kind": kind, "version": 1, **setting}
        if not path.is_file():
            return
        before: dict[str, Any] = record_from_file(path, dict[str, Any], remedy=REMEDY)
        if other := [name for name, value in self.content.items() if before.get(name) != value]:
            raise BadInput(f"{path}: its rows were measured with another {', '.join(other)}; {REMEDY}")
        self.content = before

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def has(self, part: str, key: Mapping[str, Any]) -> bool:
        """Whether there is a row of this key."""
        return any(_has_key(row, key) for row in self.content.get(part, ()))

    def row(self, part: str, key: Mapping[str, Any]) -> Row:
        """The first row of this key; LookupError where there is none."""
        rows: list[Row] = self.content.get(part, [])
        try:
            return next(row for row in rows if _has_key(row, key))
        except StopIteration:
            raise LookupError(f"no row of {part} has {dict(key)}") from None

    def put(self, part: str, row: Row, key: Sequence[str]) -> None:
        """In the place of the row that has the same key, else at the end."""
        rows: list[Row] = self.content.setdefault(part, [])
        for position, each in enumerate(rows):
            if all(each[name] == row[name] for name in key):
                rows[position] = row
                break
        else:
            rows.append(row)
        self.write()

    def order(self, part: str, name: str, values: Sequence[str]) -> None:
        """Rows by where their value stands among these; what is not among them comes last."""
        places = {value: place for place, value in enumerate(values)}
        self.content[part].sort(key=lambda row: places.get(row[name], len(places)))
        self.write()

    def set(self, name: str, value: Any) -> None:
        self.content[name] = value
        self.write()

    def write(self) -> None:
        write_json(self.path, self.content)
