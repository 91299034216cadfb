"""Code of a user that makes a model, named `module:PATH.py:FUNCTION`, which runs only if the user allowed it."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ground.errors import BadInput
from ground.quantity import quoted

PREFIX = "module:"
FAMILY = "module"
_TRUSTED: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def trusting_code(trust: bool) -> Iterator[None]:
    """Allow (`trust`) or forbid users' code to run within this context; outside of any, it is forbidden."""
    token = _TRUSTED.set(trust)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def is_code_trusted() -> bool:
    return _TRUSTED.get()


def refuse_untrusted(where: str, *, to: str = "make the model") -> None:
    """Raise BadInput unless the context allows a user's code to run."""
    if not _TRUSTED.get():
        raise BadInput(f"{where} is code, which would be run to {to}: read it, and give --trust-code if you trust it")


def is_code(text: str) -> bool:
    """Check whether a model's name starts with `module:`, as `module:PATH.py:FUNCTION` does."""
    return text.startswith(PREFIX)


def file_and_function(text: str) -> tuple[Path, str]:
    """Return PATH.py and FUNCTION of `module:PATH.py:FUNCTION`, without a check that they exist."""
    path, _, function = text.removeprefix(PREFIX).rpartition(":")
    return Path(path), function


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A Python file's path and text, and the name of its function that makes the model."""

    file: str
    function: str
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    def called(self, arguments: dict[str, Any]) -> Any:
        """Return what the function gives for named arguments; raise BadInput for code that isn't trusted or fails."""
        refuse_untrusted(self.file)
        try:
            return self._function()(**arguments)
        except (BadInput, MemoryError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            raise BadInput(
                f"{self.file}: {self.function}() fails ({reason}); arguments: {quoted(str(arguments))}"
            ) from None

    def _function(self) -> Callable[..., Any]:
        module = ModuleType(f"corp_deploy_model_{self.sha256[:16]}")
        module.__file__ = self.file
        sys.modules[module.__name__] = module  # dataclasses look their annotations up there
        exec(compile(self.source, self.file, "exec"), module.__dict__)
        function: Callable[..., Any] | None = module.__dict__.get(self.function)
        if not callable(function):
            raise BadInput(f"{self.file}: it has no function {self.function!r:.100}")
        return function
