"""Options of a command that a record declares, see invocation/option.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from corp_deploy.invocation.option import NEEDED, Record, options_of
from corp_deploy.invocation.option import Option as Declared
from corp_deploy.invocation.option_support import spelled
from corp_deploy.invocation.values import FLAG, OneOf, Repeated, Values

from .help import Headed
from .options import ANY_PATH, DIRECTORY, FILE, Command, Option, Value, explicit_options, usage_errors, value_options

PLACES: dict[str, click.ParamType[Any]] = {"FILE": FILE, "DIRECTORY": DIRECTORY, "PATH": ANY_PATH}
R = TypeVar("R", bound=Record)


def _type(values: Values | None) -> click.ParamType[Any]:
    if values is None:
        return click.STRING
    return click.Choice(values.words) if isinstance(values, OneOf) else PLACES.get(values.span) or Value(values)


def _option(declared: Declared, *, needed: bool) -> Option:
    name, of, default = spelled(declared.typed), declared.of, declared.default
    names, shown = [name, declared.name], declared.unset or default not in (None, (), NEEDED)
    default = None if default is NEEDED else default
    arguments: dict[str, Any] = {"type": _type(of), "default": default, "show_default": shown, "required": needed}
    if of is FLAG:
        names[0] = name if default is False else f"{name}/--no{name[1:]}"
        arguments = {"default": default, "is_flag": True}
    elif isinstance(of, Repeated):
        arguments |= {"type": _type(of.each), "default": default or None, "multiple": True}
    elif isinstance(default, tuple):
        arguments["default"] = ",".join(map(str, default)) or None
    if declared.flag_value is not None:
        arguments |= {"is_flag": False, "flag_value": declared.flag_value}
    names += ["-o"] * (name == "--output")
    return click.option(*names, cls=Headed, heading=declared.heading, help=declared.help, **arguments)


def options_from(record: type[Record], *only: str, needed: str = "", **helps: str) -> list[Option]:
    """Those of a record, or `only` some, of which one that it leaves open may be `needed`; `helps` say what some of
    them are for here.
    """
    return [
        _option(replace(each, help=helps.get(name, each.help)), needed=each.default is NEEDED or name == needed)
        for name, each in options_of(record, *only).items()
    ]


def record_options(
    name: str, record: type[R], *only: str, needed: str = "", **helps: str
) -> Callable[[Command], Command]:
    """A decorator that adds a record's options, see options_from, and hands the command the record as `name`."""

    def build_record(**values: Any) -> R:
        with usage_errors():
            value = record(**values)
        value.refuse_ignored(explicit_options())
        return value

    return value_options(name, build_record, *options_from(record, *only, needed=needed, **helps))
