"""One call of corp-deploy as values: what a stage runs from, and what is printed beside the files that it made."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .option_support import words_of

PROGRAM = "corp-deploy"


class Pairs(dict[str, Any]):
    """The value of an option that is spelled name=value,name=value; what is None is left out."""

    def __str__(self) -> str:
        """`channels` stands without its name: it is what a word alone means."""
        pairs = ((name, value) for name, value in self.items() if value is not None)
        return ",".join(str(value) if name == "channels" else f"{name}={value}" for name, value in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command, its arguments, and its options by name. Paths are relative to the directory that it is run in.

    None and False are not said, True stands alone, a tuple is joined with commas, a list says the option over again.
    """

    command: str
    arguments: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, option: str) -> Any:
        """None where it isn't said."""
        return self.options.get(option)

    @property
    def argv(self) -> tuple[str, ...]:
        return (PROGRAM, self.command, *self.arguments, *words_of(self.options))

    def __str__(self) -> str:
        return shlex.join(self.argv)


def path_from(directory: Path, path: Path | None) -> str | None:
    """A path as it is written in a command that is run in the directory."""
    return None if path is None else Path(os.path.relpath(path.absolute(), directory.resolve())).as_posix()
