"""What a user asks to be measured of outputs: a command or a function, and what its number is called.

What is run comes from a command line or a recipe alone: no model, graph or record can name a command. Imports no torch.
"""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corp_deploy.families.trusted_code import Code, file_and_function, is_code, refuse_untrusted
from ground.errors import BadInput
from ground.files import text_from_file
from ground.quantity import quoted

OUTPUTS = "{outputs}"
TIME_LIMIT_S = 600.0
_NAMED = re.compile(r"(?P<name>[^\s=/]*)=(?P<command>.+)", re.DOTALL)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRequest:
    """A command with `{outputs}` among its words, or `module:PATH.py:FUNCTION`, and what its number is called."""

    name: str
    command: str

    @property
    def is_code(self) -> bool:
        return is_code(self.command)

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.command)

    def program(self, below: Path) -> str:
        """As the operating system looks for it: on PATH, or from the directory where it is run."""
        first = self.argv[0]
        return os.path.normpath((below / first).absolute()) if "/" in first else first

    def code(self, below: Path) -> Code:
        """The function's file. Raises BadInput where it can't be read."""
        path, function = file_and_function(self.command)
        try:
            source = text_from_file(below / path)
        except OSError as error:
            raise BadInput(f"metric {self.name}: {path} can't be read ({error})") from None
        return Code(file=str(path), function=function, source=source)


def metric_from_text(text: str) -> MetricRequest:
    """`NAME=COMMAND`, or a command whose number is called `own`. Raises BadInput for what can't be run."""
    match = _NAMED.fullmatch(text.strip())
    if match is not None and not _NAME.fullmatch(match["name"]):
        raise BadInput(
            f"metric {quoted(text)}: {match['name'][:100]!r} is no name; use lower-case letters, digits and _, "
            "a letter first"
        )
    request = MetricRequest(name="own" if match is None else match["name"], command=match["command"] if match else text)
    if request.is_code:
        path, function = file_and_function(request.command)
        if path.suffix != ".py" or not function:
            raise BadInput(f"metric {quoted(request.command)}: expected module:PATH.py:FUNCTION")
        return request
    try:
        words = request.argv
    except ValueError as error:
        raise BadInput(f"metric {quoted(request.command)}: can't be split into words ({error})") from None
    if not any(OUTPUTS in word for word in words):
        raise BadInput(
            f"metric {quoted(request.command)}: it has no {OUTPUTS}, in whose place the file of outputs is put, as in "
            f"'python score.py {OUTPUTS}'"
        )
    if OUTPUTS in words[0]:
        raise BadInput(f"metric {quoted(request.command)}: {OUTPUTS} is data, but the first word is the program to run")
    return request


def metrics_from_texts(texts: Sequence[str]) -> tuple[MetricRequest, ...]:
    """One of each name. Raises BadInput for two of one name."""
    requests = tuple(metric_from_text(text) for text in texts)
    names = [request.name for request in requests]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"two metrics are called {twice!r}; give each a name of its own: --metric NAME='COMMAND'")
    return requests


def require_runnable(requests: Sequence[MetricRequest], *, below: Path = Path()) -> None:
    """Raise BadInput for programs and files that are not there, and for functions where code isn't trusted."""
    for request in requests:
        if request.is_code:
            refuse_untrusted(file_and_function(request.command)[0].name, to="measure outputs")
            request.code(below)
        elif shutil.which(request.program(below)) is None:
            raise BadInput(f"metric {request.name}: {quoted(request.argv[0])} can't be run: there is no such program")
