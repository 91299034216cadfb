"""An option that is declared once: a field of a frozen record, with what it may be, its default, and what it does;
and one call of corp-deploy as values: what a stage runs from, and what is printed beside the files that it made.

Of the record commands/command.py makes the options of a command, release/recipe_keys.py the keys of a recipe's
table, and api/in_python.py the parameters of a function; its constructor takes values as any of the three write them.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias, get_args, get_origin

from ground.errors import BadInput

from .option_support import spelled, words_of
from .values import FILE_OR_VALUES, FLAG, InMemory, ListOf, OneOf, Repeated, Values

PathLike: TypeAlias = str | os.PathLike[str]


class SupportsArray(Protocol):
    """An array of numpy, a tensor, and the like."""

    def __array__(self) -> Any: ...


Labels: TypeAlias = PathLike | SupportsArray | Sequence[int] | Mapping[str, int]
NEEDED = MISSING
"""The default of an option that has to be given."""
WRITTEN = (
    *("output", "summary", "write_golden", "polygraphy"),
    *("timing_cache", "latency_tables", "history", "track"),
)
"""The options that name what is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """`flag_value`: what the option means on a command line without a value. `unset`: what None comes to, in a
    word. `typed`: how a command calls it. `in_recipe`: whether recipes have the key, or how they call it. `heading`:
    what help shows it under.
    """

    name: str
    of: Values
    default: Any
    help: str
    flag_value: str | None
    unset: str | None
    typed: str
    in_recipe: bool | str
    heading: str

    def off(self, value: Any) -> bool:
        return value is False and self.default is not False

    def converted(self, value: Any) -> Any:
        """A value as it is kept; the default for None. Raises BadInput for one that the option may not be."""
        if value is None and self.default is NEEDED:
            raise BadInput(f"{spelled(self.typed)}: nothing is given, expected {self.of}")
        value = self.default if value is None else tuple(value) if isinstance(value, list) else value
        try:
            return None if value is None else _read(self.of, value)
        except BadInput as error:
            raise BadInput(f"{spelled(self.typed)}: {error}") from None


def _read(of: Values, value: Any) -> Any:
    if of.holds(value):
        return value
    if isinstance(value, tuple) and isinstance(of, ListOf | Repeated):
        return tuple(_read(of.each, one) for one in value)
    if of is FILE_OR_VALUES and not isinstance(value, str | os.PathLike):
        return InMemory(value)
    if getattr(of, "kind", None) is Path and not isinstance(value, str | os.PathLike):
        raise BadInput(f"got {type(value).__name__}, expected a path, or what a function returned that wrote the file")
    return of.from_text(os.fspath(value) if isinstance(value, os.PathLike) else str(value))


def option(
    of: Values | None = None,
    default: Any = None,
    *,
    help: str,
    flag_value: str | None = None,
    unset: str | None = None,
    typed: str | None = None,
    in_recipe: bool | str = True,
) -> Any:
    """A field of a record; what it may be, where that isn't said, is by its type: words, or true and false."""
    meta = {"of": of, "help": help, "flag_value": flag_value, "unset": unset, "typed": typed, "in_recipe": in_recipe}
    return field(default=default, metadata=meta)


def declared(record: type["Record"], name: str, default: Any) -> Any:
    """Return a field that is an option of another record, with a default of its own."""
    each = _every_option(record)[name]  # type: ignore[arg-type]  # a class is hashable, which mypy misses
    names = ("of", "help", "flag_value", "unset", "typed", "in_recipe")
    return field(default=default, metadata={key: getattr(each, key) for key in names})


def _values_of(annotation: Any) -> Values:
    parts = (annotation,) if get_origin(annotation) is Literal else get_args(annotation)
    words = tuple(word for part in parts for word in get_args(part))
    return OneOf(words) if words else FLAG


@cache
def _every_option(record: type["Record"]) -> Mapping[str, Option]:
    """Read once a class: every record looks here as it is made."""
    return {
        each.name: Option(
            name=each.name,
            default=each.default,
            heading=next(
                own.heading for own in record.__mro__ if issubclass(own, Record) and each.name in get_annotations(own)
            ),
            **{
                **each.metadata,
                "of": each.metadata["of"] or _values_of(each.type),
                "typed": each.metadata["typed"] or each.name,
            },
        )
        for each in fields(record)  # type: ignore[arg-type]  # records are dataclasses
        if "of" in each.metadata
    }


def options_of(record: type["Record"], *only: str) -> dict[str, Option]:
    """Those of a record by name, in order, or `only` some."""
    every = _every_option(record)  # type: ignore[arg-type]  # a class is hashable, which mypy misses
    return {name: every[name] for name in only or every}


def _command_value(of: Values, value: Any) -> Any:
    if isinstance(value, Mapping):
        return Pairs(value)
    return [*value] if isinstance(of, Repeated) else value


class Record:
    """Some options with their values. A frozen dataclass; constructors raise BadInput for what may not be.

    `heading` is what help shows the options that a class declares itself under.
    """

    heading: ClassVar[str] = ""

    def __init_subclass__(cls, heading: str = "") -> None:
        cls.heading = heading or cls.heading

    def __post_init__(self) -> None:
        for name, each in options_of(type(self)).items():
            object.__setattr__(self, name, each.converted(vars(self)[name]))

    @property
    def values(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in options_of(type(self))}

    @property
    def command_options(self) -> dict[str, Any]:
        """As a command is told of them, see Invocation, by what they are typed by; None and False are not said."""
        options = options_of(type(self))
        values = {each.typed: _command_value(each.of, self.values[name]) for name, each in options.items()}
        off = {f"no_{each.typed}": True for each in options.values() if each.off(values[each.typed])}
        return {name: value for name, value in values.items() if value not in (None, (), [])} | off

    @property
    def non_default(self) -> dict[str, Any]:
        open_ones = {name: each for name, each in options_of(type(self)).items() if each.default is not NEEDED}
        return {
            name: self.values[name] for name, each in open_ones.items() if self.values[name] != each.converted(None)
        }

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        """Raise BadInput for one of these options, asked for by name, that nothing of this honours."""

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> Self:
        every = options_of(cls).values()
        return cls(**{each.name: values[key] for each in every for key in (each.name, each.typed) if key in values})


PROGRAM = "corp-deploy"


class Pairs(dict[str, Any]):
    """The value of an option that is spelled name=value,name=value; what is None is left out."""

    def __str__(self) -> str:
        """`channels` stands without its name: it is what a word alone means."""
        pairs = ((name, value) for name, value in self.items() if value is not None)
        return ",".join(str(value) if name == "channels" else f"{name}={value}" for name, value in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command, its arguments, and its options by name. Paths are relative to the directory that it is run in.

    None and False are not said, True stands alone, a tuple is joined with commas, a list says the option over again.
    """

    command: str
    arguments: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, option: str) -> Any:
        """None where it isn't said."""
        return self.options.get(option)

    @property
    def argv(self) -> tuple[str, ...]:
        return (PROGRAM, self.command, *self.arguments, *words_of(self.options))

    def __str__(self) -> str:
        return shlex.join(self.argv)


def path_from(directory: Path, path: PathLike | None) -> str | None:
    """Return a path as it is written in a command that is run in the directory."""
    return None if path is None else Path(os.path.relpath(Path(path).absolute(), directory.resolve())).as_posix()
