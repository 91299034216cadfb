"""The keys of a recipe's tables, the conversion of tables to records and back, and lists of mistakes. No torch.

Each option of a table's record has one key, or one for each kind of site if its values differ by kind.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from corp_deploy.invocation.option import NEEDED, Option, Pairs, Record, options_of
from corp_deploy.invocation.values import (
    CHANNELS,
    PLACE,
    TABLE,
    TEXT,
    ByKind,
    ListOf,
    OneOf,
    ParsedText,
    Repeated,
    Values,
    literal,
)
from ground.errors import BadInput, respell_options
from ground.places import place_below
from ground.quantity import Count, Quantity, Real

R = TypeVar("R", bound=Record)


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Prefix the message of a BadInput raised in this context with `where`, a file or key."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _in(quantity: Quantity, kind: type[int] | type[float]) -> Meta:
    """Return msgspec's constraint for the range of a quantity, with bounds of the type `kind`."""
    low, high = kind(quantity.low), kind(quantity.high)
    assert (low, high) == (quantity.low, quantity.high), quantity
    if isinstance(quantity, Count):
        return Meta(ge=low, le=high, description=str(quantity))
    bounds: dict[str, Any] = {
        "gt" if quantity.low_open else "ge": low,
        "lt" if quantity.high_open else "le": high,
    }
    return Meta(**bounds, description=str(quantity))


def _number_in(quantity: Quantity) -> Any:
    """Return msgspec's type for a quantity; numbers that a recipe writes without a point stay integers."""
    if isinstance(quantity, Real) and not (quantity.low.is_integer() and quantity.high.is_integer()):
        return Annotated[float, _in(quantity, float)]
    integer = Annotated[int, _in(quantity, int)]
    return integer if isinstance(quantity, Count) else integer | Annotated[float, _in(quantity, float)]


def _list_of(each: Any, words: str, *, least: int = 0, different: bool = True) -> Any:
    """Return msgspec's type for a list; Key.decoded checks `uniqueItems`, which msgspec doesn't."""
    description = f"a list of {'different ' * different}values, {words}"
    return Annotated[
        tuple[each, ...], Meta(min_length=least, description=description, extra_json_schema={"uniqueItems": different})
    ]


def type_of(values: Values) -> Any:
    if isinstance(values, Count | Real):
        return _number_in(values)
    meta = Meta(description=str(values))
    match values:
        case OneOf(words, on):
            literal = Literal[words]  # type: ignore[valid-type]  # of a tuple that is made here
            return Annotated[bool | literal if on else literal, meta]
        case ListOf(each, example, different):
            such = [each.from_text(word) for word in example.split(",")]
            return _list_of(type_of(each), f"such as {such}, each {each}", least=1, different=different)
        case Repeated(each=each):
            return _list_of(type_of(each), f"each {each}")
        case ParsedText(kind=kind) if kind is tuple:
            return _list_of(type_of(TEXT), str(values), least=1)
        case ParsedText(kind=kind) if kind in (bool, Path) or values is TABLE:
            return Annotated[dict[str, Any] if kind is dict else kind, meta]
        case ParsedText(or_whole=or_whole, pattern=pattern):
            text = Annotated[str, Meta(pattern=pattern, description=str(values))]
            return Annotated[int, Meta(ge=0, le=2**16, description=str(values))] | text if or_whole else text
        case _:
            raise TypeError(f"{values!r}: no type of a recipe's key")


def relative_text(path: Path, directory: Path) -> str:
    """Return a path relative to a recipe's directory, always with a slash, by which it differs from a model's name."""
    relative = Path(os.path.relpath(path, directory.resolve())).as_posix()
    return relative if "/" in relative else f"./{relative}"


def _location(folder: Path, text: Any) -> Path:
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError("no path")
    return (folder / text).resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a recipe's table: the option that it sets, and the kind of site if the option has values by kind.

    `of` and `default` are the type and the default of the key's own value.
    """

    name: str
    option: Option
    kind: str
    of: Values
    default: Any

    @property
    def schema(self) -> Mapping[str, Any]:
        """The key's JSON Schema: its description and, for a list, `uniqueItems`."""
        info = msgspec.inspect.type_info(type_of(self.of))
        kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
        return next(kind.extra_json_schema or {} for kind in kinds if isinstance(kind, msgspec.inspect.Metadata))

    def decoded(self, table: str, value: object, folder: Path) -> Any:
        """Return a value of TOML as the key's type, paths made absolute from `folder`; raise BadInput for others."""
        try:
            typed = msgspec.convert(value, type_of(self.of), dec_hook=lambda _, text: _location(folder, text))
            refused = self.schema.get("uniqueItems", False) and len({*typed}) < len(typed)
        except msgspec.ValidationError:
            refused = True
        if refused or (self.of is PLACE and "\0" in typed):
            raise BadInput(f"{table}.{self.name} is {value!r:.200}, expected {self.schema['description']}")
        return place_below(folder, typed).resolve() if self.of is PLACE else typed

    def value(self, record: Record) -> Any:
        value = record.values[self.option.name]
        return value.get(self.kind) if isinstance(self.option.of, ByKind) and value is not None else value

    def plain(self, record: Record, directory: Path) -> Any:
        """Return the key's value in a record as a value of TOML, with paths relative to a directory."""
        value = self.value(record)
        if isinstance(value, tuple):
            return [_plain(each, directory) for each in value]
        if isinstance(value, Mapping) and self.of is not TABLE:
            return str(Pairs(value))
        return _plain(value, directory)


def _plain(value: Any, directory: Path) -> Any:
    if isinstance(value, Path):
        return relative_text(value, directory)
    return value if value is None or isinstance(value, bool | int | float | str | dict) else str(value)


def _keys(option: Option) -> Iterator[Key]:
    name = option.in_recipe if isinstance(option.in_recipe, str) else option.name
    if not isinstance(option.of, ByKind):
        yield Key(name=name, option=option, kind="", of=option.of, default=option.default)
        return
    defaults: Mapping[str, Any] = option.converted(None) or {}
    for kind in sorted(option.of.kinds, key=CHANNELS.__ne__):
        own = name if kind == CHANNELS else f"{name}_{kind}"
        yield Key(name=own, option=option, kind=kind, of=option.of.kinds[kind], default=defaults.get(kind))


@cache
def _every_key(record: type[Record]) -> Mapping[str, Key]:
    options = (each for each in options_of(record).values() if each.in_recipe)
    return {key.name: key for each in options for key in _keys(each)}


def keys_of(record: type[Record]) -> Mapping[str, Key]:
    """Return the keys, by name, of the recipe's table that becomes a `record`."""
    return _every_key(record)  # type: ignore[arg-type]  # a class is hashable, which mypy misses


@contextmanager
def errors_in_keys(record: type[Record], table: str) -> Iterator[None]:
    """Replace options by keys of a table in a BadInput raised in this context: --mlp 0.5 becomes reduce.mlp = 0.5.

    A message without such an option gets the table's name as a prefix.
    """
    keys = dict[str, Key]()
    for key in keys_of(record).values():
        keys.setdefault(key.option.typed, key)

    def spelled(command: str, name: str, value: str) -> str | None:
        if command or name not in keys:
            return None
        own = literal(keys[name].option.of, value) if value else ""
        return f"{table}.{keys[name].name}{f' = {own}' if own else f' {value}'.rstrip()}"

    try:
        yield
    except BadInput as error:
        text = respell_options(str(error), spelled)
        raise BadInput(text if f"{table}." in text else f"[{table}]: {text}") from None


def record_of(record: type[R], name: str, table: Mapping[str, Any]) -> R:
    """Return an instance of `record` with the values of the table `name`.

    Raises BadInput, naming keys, for wrong or missing values, and for values that would have no effect.
    """
    values = dict[str, Any]()
    for key in keys_of(record).values():
        if key.default is NEEDED and table.get(key.name) is None:
            raise BadInput(f"{name}.{key.name} is missing; write it under [{name}]")
        if table.get(key.name) is None:
            continue
        if isinstance(key.option.of, ByKind):
            values.setdefault(key.option.name, dict(key.option.converted(None) or {}))[key.kind] = table[key.name]
        else:
            values[key.option.name] = table[key.name]
    with errors_in_keys(record, name):
        built = record(**values)
        built.refuse_ignored(built.non_default)
    return built


def values_of(record: Record) -> dict[str, Any]:
    """Return a record's values, as Python objects, by the names of the recipe's keys."""
    return {name: key.value(record) for name, key in keys_of(type(record)).items()}


def content_of(record: Record, directory: Path) -> dict[str, Any]:
    """Return a record as a table of TOML with paths relative to a directory, without None and empty values."""
    plain = {key.name: key.plain(record, directory) for key in keys_of(type(record)).values()}
    return {name: value for name, value in plain.items() if value not in (None, [], {})}


class RecipeProblems:
    """A list of the mistakes in one recipe, which are reported together."""

    def __init__(self, recipe: Path) -> None:
        self._recipe = recipe.resolve()
        self._lines: list[str] = []

    def add(self, words: str) -> None:
        self._lines.append(f"{self._recipe}: {words}")

    @contextmanager
    def at(self, key: str = "") -> Iterator[None]:
        """Catch a BadInput that is raised within, and note its message, prefixed by `key` if there is one."""
        try:
            yield
        except BadInput as error:
            self.add(f"{key}: {error}" if key else str(error))

    def refuse(self) -> None:
        """Raise BadInput with all mistakes, if there are any."""
        if self._lines:
            raise BadInput("\n".join(self._lines))
