"""Flat frozen dataclasses as rows of a JSON record. A float that is not finite is written as null, read as inf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from ground.errors import BadInput

Row = TypeVar("Row")
KINDS: dict[object, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    bool: (bool,),
    float: (int, float, type(None)),
    str | None: (str, type(None)),
    int | None: (int, type(None)),
    float | None: (int, float, type(None)),
}


def json_from_row(row: object) -> dict[str, Any]:
    """The fields of a dataclass as JSON values; nested dataclasses and tuples of them become objects and lists."""
    assert dataclasses.is_dataclass(row), row
    return {field.name: _plain(getattr(row, field.name)) for field in dataclasses.fields(row)}


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return json_from_row(value) if dataclasses.is_dataclass(value) else value


def row_from_json(kind: type[Row], raw: object, *, where: str, **built: object) -> Row:
    """A dataclass of plain fields from a JSON object; `built` gives the fields that the caller has made already.

    Raises BadInput for a value that is no object, a missing field without a default, and a field of the wrong
    type, naming it.
    """
    if not isinstance(raw, Mapping):
        raise BadInput(f"{where}: expected a JSON object, got {type(raw).__name__}; is the file from this tool?")
    values = dict(built)
    assert dataclasses.is_dataclass(kind), kind
    optional = {field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}
    for name, hint in get_type_hints(kind).items():
        if name in built or (name not in raw and name in optional):
            continue
        if name not in raw:
            raise BadInput(f"{where}: the key {name!r} is missing; make the record again")
        values[name] = _field(raw[name], hint, where=f"{where}.{name}")
    return kind(**values)


def _field(value: object, hint: object, *, where: str) -> object:
    assert hint in KINDS, (where, hint)
    if not isinstance(value, KINDS[hint]) or (isinstance(value, bool) and hint is not bool):
        raise BadInput(f"{where}: got {value!r}, expected {getattr(hint, '__name__', hint)}; make the record again")
    return math.inf if value is None and hint is float else value
