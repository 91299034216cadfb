"""Options of a command that a record declares, see invocation/option.py."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from corp_deploy.invocation.honours import spelled
from corp_deploy.invocation.option import Option as Declared
from corp_deploy.invocation.option import Record, options_of
from corp_deploy.invocation.values import FLAG, OneOf, Repeated, Values

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
    given: dict[str, Any] = {"help": declared.help, "default": text}
    if declared.of is FLAG:
        return click.option(
            name if default is False else f"{name}/--no{name[1:]}", declared.name, is_flag=True, **given
        )
    if isinstance(declared.of, Repeated):
        return click.option(name, declared.name, multiple=True, type=_type(declared.of.each), help=declared.help)
    if declared.alone is not None:
        given |= {"is_flag": False, "flag_value": declared.alone}
    shown = declared.unsaid or default not in (None, ())
    return click.option(name, declared.name, type=_type(declared.of), show_default=shown, **given)


def record_options(name: str, record: type[R]) -> Callable[[Command], Command]:
    """A decorator that adds a record's options, and hands the command the record as `name`."""

    def made(**values: Any) -> R:
        with usage_errors():
            value = record(**values)
        value.refuse_ignored(explicit_options())
        return value

    return value_options(name, made, *map(_option, options_of(record).values()))
