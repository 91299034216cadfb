"""A table of a recipe that records declare, see invocation/option.py: its keys, and the record that they make."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, defstruct
from msgspec.structs import fields

from corp_deploy.invocation.option import Option, Record, options_of
from corp_deploy.invocation.values import CHANNELS, TEXT, ByKind, ListOf, OneOf, ParsedText, Repeated, Values
from ground.errors import BadInput
from ground.quantity import Count, Real

from .recipe_values import list_of, number_in

R = TypeVar("R", bound=Record)


class Table(Struct, frozen=True):
    """Some keys of a recipe and their values."""


def type_of(values: Values) -> Any:
    """What msgspec reads, which a refusal describes."""
    if isinstance(values, Count | Real):
        return number_in(values)
    meta, text = Meta(description=str(values)), Meta(pattern=r"\S", description=str(values))
    match values:
        case OneOf(words, on):
            literal = Literal[words]  # type: ignore[valid-type]  # of a tuple that is made here
            return Annotated[bool | literal if on else literal, meta]
        case ListOf(each, example, different):
            such = [each.from_text(word) for word in example.split(",")]
            return list_of(type_of(each), f"such as {such}, each {each}", least=1, different=different)
        case Repeated(each=each):
            return list_of(type_of(each or TEXT), f"each {each or TEXT}")
        case ParsedText(kind=kind) if kind is tuple:
            return list_of(type_of(TEXT), str(values), least=1)
        case ParsedText(kind=kind) if kind in (bool, Path):
            return Annotated[kind, meta]
        case ParsedText(or_whole=True):
            return Annotated[int, Meta(ge=0, le=2**16, description=str(values))] | Annotated[str, text]
        case _:
            return Annotated[str, text]


def _keys(option: Option) -> Iterator[tuple[str, str, Values, Any]]:
    """Each with its kind, what it may be and its default; an option that is told apart by kind has a key for each."""
    name = option.in_recipe if isinstance(option.in_recipe, str) else option.name
    if not isinstance(option.of, ByKind):
        yield name, "", option.of, option.default
        return
    defaults: Mapping[str, Any] = option.converted(None) or {}
    for kind in sorted(option.of.kinds, key=CHANNELS.__ne__):
        yield name if kind == CHANNELS else f"{name}_{kind}", kind, option.of.kinds[kind], defaults.get(kind)


def table_of(name: str, options: Mapping[str, Option], *own: tuple[Any, ...], **defaults: Any) -> Any:
    """The class of a table with the options' keys behind its `own`, each a name, a type, and a default where it has
    one; `defaults` are those of options that are others here.
    """
    keys = [
        (key, type_of(values) if (kept := defaults.get(key, default)) is not None else type_of(values) | None, kept)
        for option in options.values()
        if option.in_recipe and option.name not in {key for key, *_ in own}
        for key, _, values, default in _keys(option)
    ]
    return defstruct(name, [*own, *keys], bases=(Table,), frozen=True, kw_only=True, forbid_unknown_fields=True)


def record_of(record: type[R], table: Table, where: str, **others: Any) -> R:
    """The record that a table's keys make, some of its values given. Raises BadInput, naming the table, for what may
    not be, and for what is set there and would be ignored.
    """
    defaults = {field.name: field.default for field in fields(table)}
    set_values = {name: value for name in defaults if (value := getattr(table, name)) is not None}
    explicit, values = dict(others), dict(others)
    for option in options_of(record).values():
        keys = [(kind, key) for key, kind, *_ in _keys(option) if option.in_recipe and key in set_values]
        if not keys or option.name in others:
            continue
        by_kind = {kind: set_values[key] for kind, key in keys}
        values[option.name] = by_kind if isinstance(option.of, ByKind) else by_kind[""]
        if any(set_values[key] != defaults[key] for _, key in keys):
            explicit[option.name] = values[option.name]
    try:
        built = record(**values)
        built.refuse_ignored(explicit)
    except BadInput as error:
        raise BadInput(f"[{where}]: {error}") from None
    return built
