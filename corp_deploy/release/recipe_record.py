"""A table of a recipe that records declare, see invocation/option.py: its keys, and the record that they make."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Struct, defstruct
from msgspec.structs import fields

from corp_deploy.invocation.option import NEEDED, Option, Record, options_of
from corp_deploy.invocation.values import CHANNELS, TABLE, TEXT, ByKind, ListOf, OneOf, ParsedText, Repeated, Values
from ground.errors import BadInput
from ground.quantity import Count, Quantity, Real

R = TypeVar("R", bound=Record)


@contextmanager
def told_at(where: str) -> Iterator[None]:
    """A BadInput within it is a mistake there."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


class Table(Struct, frozen=True):
    """Some keys of a recipe and their values; `helps` say what each is for."""

    helps: ClassVar[Mapping[str, str]] = {}


def _in(quantity: Quantity, kind: type[int] | type[float]) -> Meta:
    """The bounds of a quantity for numbers that are written as whole ones, or with a point."""
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
    """The type of such a number; one that is written without a point stays as it is written."""
    if isinstance(quantity, Real) and not (quantity.low.is_integer() and quantity.high.is_integer()):
        return Annotated[float, _in(quantity, float)]
    integer = Annotated[int, _in(quantity, int)]
    return integer if isinstance(quantity, Count) else integer | Annotated[float, _in(quantity, float)]


def _list_of(each: Any, words: str, *, least: int = 0, different: bool = True) -> Any:
    """A list of at least so many values; uniqueItems is JSON Schema's word, and the reader holds to it."""
    description = f"a list of {'different ' * different}values, {words}"
    return Annotated[
        tuple[each, ...], Meta(min_length=least, description=description, extra_json_schema={"uniqueItems": different})
    ]


def type_of(values: Values) -> Any:
    """What msgspec reads, which a refusal describes."""
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


def _keys(option: Option) -> Iterator[tuple[str, str, Values, Any]]:
    """Each with its kind, what it may be and its default; an option that is told apart by kind has a key for each."""
    name = option.in_recipe if isinstance(option.in_recipe, str) else option.name
    if not isinstance(option.of, ByKind):
        yield name, "", option.of, option.default
        return
    defaults: Mapping[str, Any] = option.converted(None) or {}
    for kind in sorted(option.of.kinds, key=CHANNELS.__ne__):
        yield name if kind == CHANNELS else f"{name}_{kind}", kind, option.of.kinds[kind], defaults.get(kind)


def keys_alone(**declared: Any) -> dict[str, Option]:
    """Keys that no command has an option for, or that a recipe takes in its own form, declared as an option is."""
    every = [(name, Any, each) for name, each in declared.items()]
    return options_of(make_dataclass("Keys", every, bases=(Record,), kw_only=True))


def table_of(*parts: Mapping[str, Option], **defaults: Any) -> Any:
    """The class of a table with the keys of these options; `defaults` are those of options that are others here."""
    options = {name: option for part in parts for name, option in part.items()}
    keys = list[tuple[Any, ...]]()
    for option in options.values():
        for name, _, values, own in _keys(option) if option.in_recipe else ():
            kind, default = type_of(values), defaults.get(name, own)
            keys.append(
                (name, kind) if default is NEEDED else (name, kind | None if default is None else kind, default)
            )
    namespace = {"helps": {key: option.help for option in options.values() for key, *_ in _keys(option)}}
    return defstruct(
        "Keys", keys, bases=(Table,), namespace=namespace, frozen=True, kw_only=True, forbid_unknown_fields=True
    )


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
    with told_at(f"[{where}]"):
        built = record(**values)
        built.refuse_ignored(explicit)
    return built


class RecipeProblems:
    """Those of one recipe."""

    def __init__(self, recipe: Path) -> None:
        self._recipe = recipe.resolve()
        self._lines: list[str] = []

    def add(self, words: str) -> None:
        self._lines.append(f"{self._recipe}: {words}")

    @contextmanager
    def at(self, key: str = "") -> Iterator[None]:
        """A BadInput within it is a mistake of this key; of what it names itself where none is given."""
        try:
            yield
        except BadInput as error:
            self.add(f"{key}: {error}" if key else str(error))

    def refuse(self) -> None:
        """Raise BadInput where there are any."""
        if self._lines:
            raise BadInput("\n".join(self._lines))
