"""Assertions that a call is refused."""

from collections.abc import Callable
from typing import ParamSpec

import pytest

from ground.errors import BadInput, Missing

P = ParamSpec("P")


def rejects(message: str, call: Callable[P, object], /, *given: P.args, **named: P.kwargs) -> None:
    """Assert that a call raises BadInput with a message that this pattern matches."""
    with pytest.raises(BadInput, match=message):
        call(*given, **named)


def reports_missing(message: str, call: Callable[P, object], /, *given: P.args, **named: P.kwargs) -> None:
    """Assert that a call raises Missing with a message that this pattern matches."""
    with pytest.raises(Missing, match=message):
        call(*given, **named)
