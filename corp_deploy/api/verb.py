"""A public function of what a record declares: its parameters with their types, defaults and help."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from corp_deploy.invocation.option import Record, options_of

from .in_python import in_python, speaking_python

P = ParamSpec("P")
R = TypeVar("R", bound=Record)
T = TypeVar("T")


def verb(record: Callable[P, R]) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """A decorator of a function that takes a record alone: what is called takes the record's fields in its place.

    It raises TypeError for what is no parameter, as a function does, and BadInput for what would be ignored, in words
    of parameters.
    """
    signature = inspect.signature(record)
    assert isinstance(record, type), record
    helps = {name: each.help for name, each in options_of(record).items()}

    def decorate(function: Callable[[R], T]) -> Callable[P, T]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                arguments: dict[str, Any] = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                words = f"{function.__name__}() {error}; its options are {', '.join(signature.parameters)}"
                raise TypeError(words) from None
            with speaking_python(record, parameters=signature.parameters):
                call = record(*args, **kwargs)
                kept = call.values
                call.refuse_ignored({name: kept[name] for name in kept if arguments.get(name) is not None})
                return function(call)

        hints = {name: each.annotation for name, each in signature.parameters.items()}
        called.__annotations__ = hints | {"return": inspect.signature(function).return_annotation}
        called.__signature__ = signature.replace(  # type: ignore[attr-defined]
            return_annotation=called.__annotations__["return"]
        )
        lines = (
            f"`{name}`: {in_python(help, record, parameters=signature.parameters)}" for name, help in helps.items()
        )
        called.__doc__ = "\n\n".join((inspect.getdoc(function) or "", *lines))
        return called

    return decorate
