"""Calls that are to be refused."""

from collections.abc import Callable
from typing import ParamSpec

import pytest

from ground.errors import BadInput

P = ParamSpec("P")


def rejects(message: str, call: Callable[P, object], /, *given: P.args, **named: P.kwargs) -> None:
    """The call is bad input, and said to be so in words in which this pattern is found."""
    with pytest.raises(BadInput, match=message):
        call(*given, **named)
