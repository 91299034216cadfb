"""What happened to a command, one kind a record."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """What happened to a command, its exit codes, what is left, and what of that is not as it should be."""

    made_by: str
    what: str
    command: str
    codes: Sequence[int]
    outcome: str
    wrong: Sequence[str]


def not_held(**held: bool) -> list[str]:
    return [name.replace("_", " ") for name, holds in held.items() if not holds]
