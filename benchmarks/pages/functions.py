"""The public functions whose parameters a record declares, as the reference shows them."""

import inspect

import corp_deploy
from corp_deploy.api.inputs import InputsLike
from corp_deploy.api.source import ModelLike, PathLike

ALIASES = {"ModelLike": ModelLike, "InputsLike": InputsLike, "PathLike": PathLike}


def _annotation(annotation: object) -> str:
    """As it is written in the code, but for names without their modules."""
    text = inspect.formatannotation(annotation)
    for name, alias in ALIASES.items():
        text = text.replace(inspect.formatannotation(alias), name)
    for module in ("collections.abc.", "typing.", "pathlib.", "os."):
        text = text.replace(module, "")
    return text.rpartition(".")[2] if text.startswith("corp_deploy.") else text


def _parameter(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"    {parameter.name}: {_annotation(parameter.annotation)}{default},"


def function(name: str) -> str:
    """A function's section."""
    shown = getattr(corp_deploy, name)
    signature = inspect.signature(shown)
    every = list(signature.parameters.values())
    positional = [each for each in every if each.kind is each.POSITIONAL_OR_KEYWORD]
    lines = [
        f"{name}(",
        *map(_parameter, positional),
        "    *,",
        *map(_parameter, every[len(positional) :]),
        f") -> {_annotation(signature.return_annotation)}",
    ]
    code = "\n".join(lines)
    return f"## `corp_deploy.{name}` {{ #corp_deploy.{name} }}\n\n```python\n{code}\n```\n\n{inspect.getdoc(shown)}"
