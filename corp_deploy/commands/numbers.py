"""Option types for numbers: one of a quantity, several of it, the multiples of widths, a batch profile."""

from typing import Any

import click

from export.engine.options import BatchProfile
from ground.errors import BadInput
from ground.quantities import ALIGNMENT
from ground.quantity import Count, Quantity, shown


class Number(click.ParamType[int | float]):
    """One number of a quantity."""

    def __init__(self, quantity: Quantity) -> None:
        self.quantity = quantity
        self.name = "integer" if isinstance(quantity, Count) else "number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.quantity.span

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        try:
            return self.quantity.from_text(str(value))
        except BadInput as error:
            self.fail(str(error), param, ctx)


class Numbers(click.ParamType[tuple[int | float, ...]]):
    """Different numbers of a quantity, separated by commas."""

    def __init__(self, quantity: Quantity, *, example: str) -> None:
        self.quantity, self.example = quantity, example
        self.name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self.quantity.from_text(part.strip(" ")) for part in str(value).split(","))
        except BadInput as error:
            self.fail(f"{error}, or several separated by commas, such as {self.example}", param, ctx)
        if len(set(numbers)) != len(numbers):
            self.fail(f"{shown(str(value))}: a number stands there twice; give each once", param, ctx)
        return numbers


class Channels(click.ParamType[tuple[int | float, ...]]):
    """One number of a quantity for all channels of an image, or one for each, separated by commas."""

    name = "x or x,x,x"

    def __init__(self, quantity: Quantity) -> None:
        self.quantity = quantity

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.quantity.from_text(part.strip(" ")) for part in str(value).split(","))
        except BadInput as error:
            self.fail(f"{error}, or one for each channel, such as 0.485,0.456,0.406", param, ctx)


class Alignment(click.ParamType[dict[str, int]]):
    """mlp=64,head=16,conv=32; any may be left out."""

    name = "mlp=n,head=n,conv=n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        pairs = [part.strip(" ").partition("=") for part in str(value).split(",")]
        names = [name for name, _, _ in pairs]
        if {*names} - {"mlp", "head", "conv"} or len({*names}) != len(names):
            self.fail(f"{shown(str(value))}: expected mlp=64,head=16,conv=32, each once, or some of them", param, ctx)
        try:
            return {name: ALIGNMENT.from_text(number) for name, _, number in pairs}
        except BadInput as error:
            self.fail(f"{error} after mlp=, head= and conv=", param, ctx)


WIDTHS = "mlp=64,head=16,conv=32"
"""Multiples where nothing is said of them."""


class Profile(click.ParamType[BatchProfile]):
    """A batch profile of an engine: min:opt:max, or one number for a fixed batch."""

    name = "min:opt:max"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> BatchProfile:
        try:
            return BatchProfile.from_text(str(value))
        except BadInput as error:
            self.fail(str(error), param, ctx)
