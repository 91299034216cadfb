"""Options of a command that a record declares, see invocation/option.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from corp_deploy.invocation.option import Option as Declared
from corp_deploy.invocation.option import Record, options_of
from corp_deploy.invocation.option_support import spelled
from corp_deploy.invocation.values import FLAG, OneOf, Repeated, Values

from .help import under
from .options import ANY_PATH, DIRECTORY, FILE, Command, Option, explicit_options, usage_errors, value_options
from .value import Value

PLACES: dict[str, click.ParamType[Any]] = {"FILE": FILE, "DIRECTORY": DIRECTORY, "PATH": ANY_PATH}
R = TypeVar("R", bound=Record)


def _type(values: Values | None) -> click.ParamType[Any]:
    if values is None:
        return click.STRING
    return click.Choice(values.words) if isinstance(values, OneOf) else PLACES.get(values.span) or Value(values)


def _option(declared: Declared) -> Option:
    name = spelled(declared.typed)
    default = declared.default
    text = (",".join(map(str, default)) or None) if isinstance(default, tuple) else default
    arguments: dict[str, Any] = {"help": declared.help, "default": text}
    short = ("-o",) if name == "--output" else ()
    if declared.of is FLAG:
        return click.option(
            name if default is False else f"{name}/--no{name[1:]}", declared.name, is_flag=True, **arguments
        )
    if isinstance(declared.of, Repeated):
        arguments = {"help": declared.help, "default": default or None, "show_default": bool(default)}
        return click.option(name, declared.name, multiple=True, type=_type(declared.of.each), **arguments)
    if declared.flag_value is not None:
        arguments |= {"is_flag": False, "flag_value": declared.flag_value}
    shown = declared.unset or default not in (None, ())
    return click.option(name, *short, declared.name, type=_type(declared.of), show_default=shown, **arguments)


def options_from(record: type[Record], *only: str, **helps: str) -> list[Option]:
    """Those of a record, or `only` some; `helps` say what some of them are for here."""
    every = options_of(record, *only).items()
    return [under(each.heading, _option(replace(each, help=helps.get(name, each.help)))) for name, each in every]


def record_options(name: str, record: type[R], *only: str, **helps: str) -> Callable[[Command], Command]:
    """A decorator that adds a record's options, see options_from, and hands the command the record as `name`."""

    def build_record(**values: Any) -> R:
        with usage_errors():
            value = record(**values)
        value.refuse_ignored(explicit_options())
        return value

    return value_options(name, build_record, *options_from(record, *only, **helps))
