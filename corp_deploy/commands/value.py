"""The type of options whose values read themselves from a text, see invocation/values.py."""

from typing import Any

import click

from corp_deploy.invocation.values import Values
from ground.errors import BadInput


class Value(click.ParamType[Any]):
    """What reads itself from a text: a quantity, or other values of an option."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.name = values.span

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.values.holds(value):
            return value
        try:
            return self.values.from_text(str(value))
        except BadInput as error:
            self.fail(str(error), param, ctx)
