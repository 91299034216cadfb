"""The values that keys of a recipe may have, a type each; its description says in a refusal what was expected."""

from pathlib import Path
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from ground import quantities
from ground.quantity import Count, Quantity, Real


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


def number_in(quantity: Quantity) -> Any:
    """The type of such a number; one that is written without a point stays as it is written."""
    if isinstance(quantity, Real) and not (quantity.low.is_integer() and quantity.high.is_integer()):
        return Annotated[float, _in(quantity, float)]
    integer = Annotated[int, _in(quantity, int)]
    return integer if isinstance(quantity, Count) else integer | Annotated[float, _in(quantity, float)]


def list_of(each: Any, words: str, *, least: int = 0, different: bool = True) -> Any:
    """A list of at least so many values; uniqueItems is JSON Schema's word, and the reader holds to it."""
    description = f"a list of {'different ' * different}values, {words}"
    return Annotated[
        tuple[each, ...], Meta(min_length=least, description=description, extra_json_schema={"uniqueItems": different})
    ]


_NOT_EMPTY = "a text that is not empty"

Text: TypeAlias = Annotated[str, Meta(pattern=r"\S", description=_NOT_EMPTY)]
Texts: TypeAlias = Annotated[
    tuple[Text, ...], Meta(description="a list of different texts", extra_json_schema={"uniqueItems": True})
]
Location: TypeAlias = Annotated[Path, Meta(description=_NOT_EMPTY)]
"""A file or folder: written relative to the recipe, read as an absolute path."""
Locations: TypeAlias = Annotated[
    tuple[Path, ...], Meta(description="a list of different files", extra_json_schema={"uniqueItems": True})
]
Arguments: TypeAlias = Annotated[dict[str, Any], Meta(description="a table of arguments")]
ServedName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]*\Z",
        description="letters, digits, '_', '.' and '-', starting with a letter or digit",
    ),
]
Licence: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"\A\(*[A-Za-z0-9][A-Za-z0-9.+-]*\)*(?: (?:AND|OR|WITH) \(*[A-Za-z0-9][A-Za-z0-9.+-]*\)*)*\Z",
        max_length=500,
        description="an SPDX expression, such as 'Apache-2.0', 'CC-BY-4.0 AND MIT' or 'LicenseRef-ours'",
    ),
]

Images: TypeAlias = Annotated[int, _in(quantities.IMAGES, int)]
