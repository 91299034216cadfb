"""The public functions whose parameters a record declares, as the reference shows them."""

import inspect
import re
from collections.abc import Callable

import corp_deploy
from corp_deploy.api.models import ModelLike, PathLike
from corp_deploy.api.values import InputsLike
from corp_deploy.invocation.option import Labels

ALIASES = {"ModelLike": ModelLike, "InputsLike": InputsLike, "Labels": Labels, "PathLike": PathLike}
_MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+")


def _annotation(annotation: object) -> str:
    """As it is written in the code, but for names without their modules."""
    text = inspect.formatannotation(annotation)
    for name, alias in ALIASES.items():
        text = text.replace(inspect.formatannotation(alias), name)
    return _MODULES.sub("", text)


def _parameter(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"    {parameter.name}: {_annotation(parameter.annotation)}{default},"


def _signature(shown: Callable[..., object], name: str) -> str:
    """A call with all parameters, one a line, as a block of code."""
    signature = inspect.signature(shown)
    every = list(signature.parameters.values())
    positional = [each for each in every if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = every[len(positional) :]
    returned = "" if isinstance(shown, type) else f" -> {_annotation(signature.return_annotation)}"
    lines = [f"{name}(", *map(_parameter, positional), *["    *,"][: len(named)], *map(_parameter, named)]
    code = "\n".join([*lines, f"){returned}"])
    return f"```python\n{code}\n```"


def function(name: str) -> str:
    """The section of a function, or of a class: what it is called with, what its docstring and those of its properties
    say. An exception is caught, not called.
    """
    shown = getattr(corp_deploy, name)
    is_error = isinstance(shown, type) and issubclass(shown, Exception)
    parts = [f"## `corp_deploy.{name}` {{ #corp_deploy.{name} }}"]
    parts += [] if is_error else [_signature(shown, name)]
    parts.append(inspect.getdoc(shown) or "")
    for own, value in vars(shown).items():
        if isinstance(value, property) and not own.startswith("_"):
            parts.append(f"`{own}`: {inspect.getdoc(value)}")
    return "\n\n".join(parts)
