"""The command at work as a line to type again, with something added."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import click

from corp_deploy.invocation.call import Invocation, Pairs
from corp_deploy.invocation.values import ByKind

from .options import Value, explicit_options, typed_name


def _as_printed(context: click.Context) -> Iterator[tuple[str, Any]]:
    """What was typed, under the names that options are typed by."""
    explicit = explicit_options()
    for parameter in context.command.params:
        if not isinstance(parameter, click.Option) or typed_name(parameter) not in explicit:
            continue
        value, names = explicit[typed_name(parameter)], parameter.opts
        if value is False:
            value, names = True, parameter.secondary_opts
        elif isinstance(parameter.type, Value) and isinstance(parameter.type.values, ByKind):
            value = Pairs(value)
        elif isinstance(value, dict):
            value = json.dumps(value)
        yield max(names, key=len).lstrip("-"), value


def _again(without: Collection[str], added: Mapping[str, Any]) -> Invocation:
    context = click.get_current_context()
    options = dict(_as_printed(context)) | {name.replace("_", "-"): value for name, value in added.items()}
    left = {name: value for name, value in options.items() if name.replace("-", "_") not in without}
    return Invocation(command=str(context.info_name), options=left)


def command_again(**added: Any) -> str:
    """What was typed for this command, and what is added to it."""
    return str(_again((), added))


def words_again(without: Collection[str] = (), **added: Any) -> tuple[str, ...]:
    """The same as the words behind the program's name, without some options."""
    return _again(without, added).argv[1:]
