"""A table of a recipe that a record declares, see invocation/option.py: its keys, and the record that they make."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, defstruct
from msgspec.structs import asdict

from corp_deploy.invocation.option import Option, Record, options_of
from corp_deploy.invocation.values import CHANNELS, ByKind, OneOf, Spelled, Values
from ground.quantity import Count, Real

from .recipe_table import Table
from .recipe_values import number_in

R = TypeVar("R", bound=Record)


def _type(values: Values) -> Any:
    """What msgspec reads, which a refusal describes."""
    if isinstance(values, Count | Real):
        return number_in(values)
    said, text = Meta(description=str(values)), Meta(pattern=r"\S", description=str(values))
    match values:
        case OneOf(words, on):
            literal = Literal[words]  # type: ignore[valid-type]  # of a tuple that is made here
            return Annotated[bool | literal if on else literal, said]
        case Spelled(kind=kind) if kind in (bool, Path):
            return Annotated[kind, said]
        case Spelled(or_whole=True):
            return Annotated[int, Meta(ge=0, le=2**16, description=str(values))] | Annotated[str, text]
        case _:
            return Annotated[str, text]


def _keys(option: Option) -> Iterator[tuple[str, str, Values, Any]]:
    """Each with its kind, what it may be and its default; an option that is told apart by kind has a key for each."""
    if not isinstance(option.of, ByKind):
        yield option.name, "", option.of, option.default
        return
    defaults: Mapping[str, Any] = option.taken(None) or {}
    for kind in sorted(option.of.kinds, key=CHANNELS.__ne__):
        name = option.name if kind == CHANNELS else f"{option.name}_{kind}"
        yield name, kind, option.of.kinds[kind], defaults.get(kind)


def table_of(name: str, record: type[Record]) -> Any:
    """The class of a table with the record's keys."""
    keys = [
        (key, _type(values) if default is not None else _type(values) | None, default)
        for option in options_of(record).values()
        if option.in_recipe
        for key, _, values, default in _keys(option)
    ]
    return defstruct(name, keys, bases=(Table,), frozen=True, kw_only=True, forbid_unknown_fields=True)


def record_of(record: type[R], table: Table) -> R:
    """The record that a table's keys make."""
    given = {name: value for name, value in asdict(table).items() if value is not None}
    values: dict[str, Any] = {}
    for name, option in options_of(record).items():
        if option.in_recipe and isinstance(option.of, ByKind):
            values[name] = {kind: given[key] for key, kind, *_ in _keys(option) if key in given} or None
        elif option.in_recipe:
            values[name] = given.get(name)
    return record(**values)
