"""What a user asks to be measured of outputs: a command or a function, and what its number is called.

What is run comes from a command line or a recipe alone: no model, graph or record can name a command. Imports no torch.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from corp_deploy.families.trusted_code import file_and_function, is_code
from ground.errors import BadInput
from ground.quantity import shown

OUTPUTS = "{outputs}"
TIME_LIMIT_S = 600.0
_NAMED = re.compile(r"(?P<name>[a-z][a-z0-9_]*)=(?P<command>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRequest:
    """A command with `{outputs}` among its words, or `module:PATH.py:FUNCTION`, and what its number is called."""

    name: str
    command: str

    @property
    def is_code(self) -> bool:
        return is_code(self.command)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)


def metric_from_text(text: str) -> MetricRequest:
    """`NAME=COMMAND`, or a command whose number is called `own`. Raises BadInput for what can't be run."""
    match = _NAMED.fullmatch(text.strip())
    request = MetricRequest(name="own" if match is None else match["name"], command=match["command"] if match else text)
    if request.is_code:
        path, function = file_and_function(request.command)
        if path.suffix != ".py" or not function:
            raise BadInput(f"metric {shown(request.command)}: expected module:PATH.py:FUNCTION")
        return request
    try:
        words = request.words
    except ValueError as error:
        raise BadInput(f"metric {shown(request.command)}: can't be split into words ({error})") from None
    if not any(OUTPUTS in word for word in words):
        raise BadInput(
            f"metric {shown(request.command)}: it has no {OUTPUTS}, in whose place the file of outputs is put, as in "
            f"'python score.py {OUTPUTS}'"
        )
    return request


def metrics_from_texts(texts: Sequence[str]) -> tuple[MetricRequest, ...]:
    """One of each name. Raises BadInput for two of one name."""
    requests = tuple(metric_from_text(text) for text in texts)
    names = [request.name for request in requests]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"two metrics are called {twice!r}; give each a name of its own: --metric NAME='COMMAND'")
    return requests
