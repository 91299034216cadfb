"""What every table of a recipe is. Imports no torch."""

from collections.abc import Mapping
from typing import Any

import msgspec

from corp_deploy.invocation.option_support import Axis
from ground.errors import BadInput


def refuse_ignored(where: str, axis: Axis, way: str, options: Mapping[str, Any]) -> None:
    """Raise BadInput for an option that is set, which the way at work would ignore."""
    try:
        axis.refuse([("", way)], {name: value for name, value in options.items() if value is not None})
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


class Table(msgspec.Struct, frozen=True):
    """Some keys and their values."""
