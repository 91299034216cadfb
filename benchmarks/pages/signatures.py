"""A griffe extension that shows the call signatures of functions whose parameters a record declares."""

import inspect
import re
from typing import Any

import griffe

import corp_deploy
from corp_deploy.api.models import ModelLike, PathLike
from corp_deploy.api.values import InputsLike
from corp_deploy.invocation.option import Labels

ALIASES = {"ModelLike": ModelLike, "InputsLike": InputsLike, "Labels": Labels, "PathLike": PathLike}
KINDS = {kind: griffe.ParameterKind(kind.description) for kind in inspect._ParameterKind}
_MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+")


class Signatures(griffe.Extension):
    """Replaces the parameters of the public functions."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        called = getattr(corp_deploy, func.name, None) if func.name in corp_deploy.__all__ else None
        if called is not None and hasattr(called, "__signature__"):
            func.parameters = griffe.Parameters(*map(_shown, inspect.signature(called).parameters.values()))


def _shown(parameter: inspect.Parameter) -> griffe.Parameter:
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    annotation = inspect.formatannotation(parameter.annotation)
    for name, alias in ALIASES.items():
        annotation = annotation.replace(inspect.formatannotation(alias), name)
    return griffe.Parameter(
        parameter.name, annotation=_MODULES.sub("", annotation), kind=KINDS[parameter.kind], default=default
    )
