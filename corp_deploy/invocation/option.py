"""Options that are declared once, as fields of frozen records, and invocations of commands as values.

From a record, commands/command.py makes the options of a command, release/recipe_keys.py the keys of a recipe's table,
and api/in_python.py the parameters of a function. The record's constructor converts texts of a command line, values of
TOML and Python objects.
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
from ground.places import Url

from .option_support import spelled, words_of
from .values import FILE_OR_VALUES, FLAG, InMemory, ListOf, OneOf, Repeated, Values

PathLike: TypeAlias = str | os.PathLike[str]


class SupportsArray(Protocol):
    """An object that numpy can convert, such as an array or a tensor."""

    def __array__(self) -> Any: ...


Labels: TypeAlias = PathLike | SupportsArray | Sequence[int] | Mapping[str, int]
NEEDED = MISSING
"""The default that marks an option as required."""
WRITTEN = (
    *("output", "summary", "write_golden", "polygraphy"),
    *("timing_cache", "latency_tables", "history", "track", "metrics"),
)
"""The options that name files or directories to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of one option: its name, the type of its values (`of`), its default and its help."""

    name: str
    of: Values
    default: Any
    help: str
    flag_value: str | None
    """The value of an option that is typed without a value (--closed-loop alone), None for options that need one."""
    unset: str | None
    """The default that help shows where the default is None."""
    typed: str
    """The option's name in a command."""
    in_recipe: bool | str
    """False if recipes lack the key, or the key's name if it differs."""
    heading: str

    def off(self, value: Any) -> bool:
        return value is False and self.default is not False

    def converted(self, value: Any) -> Any:
        """Return a value as the option's type, None as the default; raise BadInput if wrong, or None but required."""
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
    if getattr(of, "kind", None) in (Path, Path | Url) and not isinstance(value, str | os.PathLike):
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
    """Return the dataclass field of an option; without `of`, its annotation (a Literal or bool) lists the values."""
    meta = {"of": of, "help": help, "flag_value": flag_value, "unset": unset, "typed": typed, "in_recipe": in_recipe}
    return field(default=default, metadata=meta)


def declared(record: type["Record"], name: str, default: Any) -> Any:
    """Return the dataclass field of an option declared like the option `name` of `record`, but with another default."""
    each = _every_option(record)[name]  # type: ignore[arg-type]  # a class is hashable, which mypy misses
    names = ("of", "help", "flag_value", "unset", "typed", "in_recipe")
    return field(default=default, metadata={key: getattr(each, key) for key in names})


def _values_of(annotation: Any) -> Values:
    parts = (annotation,) if get_origin(annotation) is Literal else get_args(annotation)
    words = tuple(word for part in parts for word in get_args(part))
    return OneOf(words) if words else FLAG


@cache
def _every_option(record: type["Record"]) -> Mapping[str, Option]:
    """Return the options of a record by field name, cached, since every constructor of a record reads them."""
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
    """Return the options of a record by field name in the order of declaration, or only those named in `only`."""
    every = _every_option(record)  # type: ignore[arg-type]  # a class is hashable, which mypy misses
    return {name: every[name] for name in only or every}


def _command_value(of: Values, value: Any) -> Any:
    if isinstance(value, Mapping):
        return Pairs(value)
    return [*value] if isinstance(of, Repeated) else value


class Record:
    """A frozen dataclass whose fields are options, and whose constructor converts the values or raises BadInput.

    Help shows the options that a class itself declares, not those it inherits, under the class's `heading`.
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
        """The values by typed name, without None and empty ones; a False that isn't the default adds no_NAME: True."""
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
        """Raise BadInput for one of `options` (values by typed name) that has no effect beside this record's values."""

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> Self:
        every = options_of(cls).values()
        return cls(**{each.name: values[key] for each in every for key in (each.name, each.typed) if key in values})


PROGRAM = "corp-deploy"


class Pairs(dict[str, Any]):
    """A mapping whose text is name=value,name=value, as commands spell it, without names whose value is None."""

    def __str__(self) -> str:
        """Return the pairs joined with commas, that of `channels` as the value alone."""
        pairs = ((name, value) for name, value in self.items() if value is not None)
        return ",".join(str(value) if name == "channels" else f"{name}={value}" for name, value in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command, its arguments, and its options by name. Paths are relative to the directory that it is run in.

    In `options`, None and False leave an option out of the command line; True is a flag, a tuple is values joined with
    commas, and a list is an option that is repeated.
    """

    command: str
    arguments: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, option: str) -> Any:
        """Return an option's value, None if it isn't given."""
        return self.options.get(option)

    @property
    def argv(self) -> tuple[str, ...]:
        return (PROGRAM, self.command, *self.arguments, *words_of(self.options))

    def __str__(self) -> str:
        return shlex.join(self.argv)


def path_from(directory: Path, path: PathLike | None) -> str | None:
    """Return a path relative to `directory`, where a command is run, with slashes; None and URLs as they are."""
    if path is None or isinstance(path, Url):
        return path
    return Path(os.path.relpath(Path(path).absolute(), directory.resolve())).as_posix()
