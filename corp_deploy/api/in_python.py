"""Public functions made from records, and messages in terms of Python.

A record declares the parameters of a function, with types, defaults and help. Messages name options as commands spell
them; here parameters take their place.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from corp_deploy.invocation.calibration import CalibrateOptions
from corp_deploy.invocation.engine import ShipOptions
from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.input_choice import Drawn, HoldOutOptions
from corp_deploy.invocation.option import WRITTEN, Option, Record, options_of
from corp_deploy.invocation.proof import ProofOptions
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.invocation.source import ModelSource
from corp_deploy.invocation.values import DIRECTORY, FLAG, literal
from ground.errors import BadInput, Missing, respell_options
from ground.outputs import require_writable

P = ParamSpec("P")
R = TypeVar("R", bound=Record)
T = TypeVar("T")
FUNCTIONS: Mapping[str, tuple[type[Record], ...]] = {
    "Source": (ModelSource,),
    "calibrate": (CalibrateOptions, Drawn),
    "reduce": (ReduceOptions, HoldOutOptions, Drawn),
    "export": (ExportOptions, Drawn),
    "verify": (ProofOptions, HoldOutOptions, Drawn),
    "bench": (BenchOptions,),
    "ship": (ShipOptions,),
}
INPUTS = ("images", "text", "arrays", "tokens")


def _typed(records: Collection[type[Record]]) -> dict[str, Option]:
    """Return the options of records by the names that commands have for them."""
    return {each.typed: each for record in records for each in options_of(record).values()}


def _argument(options: Mapping[str, Option], name: str, value: str, form: str = "{}") -> str | None:
    """Return an option as a Python argument, `mlp=0.5`, None if unknown; `value` follows it if it is another word."""
    if (negated := options.get(name.removeprefix("no_"))) is not None and name not in options:
        return f"`{form.format(f'{negated.name}=False')}` {value}".rstrip()
    if (option := options.get(name)) is None:
        return None
    if own := literal(option.of, value) if value else "":
        return f"`{form.format(f'{option.name}={own}')}`"
    bare = f"{option.name}=True" if option.of is FLAG else option.name + "=..." * (form != "{}")
    return f"`{form.format(bare)}` {value}".rstrip()


def message_in_python(message: str, *records: type[Record], parameters: Collection[str] = ()) -> str:
    """Return a message with parameters in place of options: those of these records first, then `parameters`."""
    of_function = _typed(records)

    def spelled(word: str, name: str, value: str) -> str | None:
        if word:
            return _argument(_typed(FUNCTIONS[word]), name, value, f"{word}({{}})") if word in FUNCTIONS else None
        if found := _argument(of_function, name, value):
            return found
        if name in INPUTS:
            return f"`inputs` {value}".rstrip()
        if name == "model":
            return f"model {value}".rstrip()
        if name.startswith("trust_"):
            return (
                f"`{name}=True` {value}".rstrip() if name in parameters else f"`Source({name}=True)` {value}".rstrip()
            )
        if name in parameters:
            return f"`{name}` {value}".rstrip()
        every = (_argument(_typed(own), name, value, f"{function}({{}})") for function, own in FUNCTIONS.items())
        return next(filter(None, every), f"the commands' option {name!r} {value}".rstrip())

    text = respell_options(message, spelled)
    for again in (" (or `inputs`)", ", or `inputs`", ", `inputs`", " or `inputs`", " and `inputs`"):
        text = text.replace(f"`inputs`{again}", "`inputs`")
    return text


@contextmanager
def errors_in_python(*records: type[Record], parameters: Collection[str] = ()) -> Iterator[None]:
    """Replace options with parameters in a BadInput or Missing raised in this context, see message_in_python."""
    try:
        yield
    except (BadInput, Missing) as error:
        error.args = (message_in_python(str(error), *records, parameters=parameters),)
        raise


def function_from_record(record: Callable[P, R]) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Return a decorator for a function of one record; the decorated function takes the record's fields instead.

    That function raises TypeError for unknown parameters, and BadInput for wrong ones and for those that it would
    ignore.
    """
    signature = inspect.signature(record)
    assert isinstance(record, type), record
    helps = [(name, each.help) for name, each in options_of(record).items()]

    def decorate(function: Callable[[R], T]) -> Callable[P, T]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                arguments: dict[str, Any] = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                words = f"{function.__name__}() {error}; its options are {', '.join(signature.parameters)}"
                raise TypeError(words) from None
            with errors_in_python(record, parameters=signature.parameters):
                call = record(*args, **kwargs)
                kept = call.values
                call.refuse_ignored({name: kept[name] for name in kept if arguments.get(name) is not None})
                for name in WRITTEN:
                    if kept.get(name) is not None:
                        require_writable(Path(kept[name]), folder=options_of(record)[name].of is DIRECTORY)
                return function(call)

        hints = {name: each.annotation for name, each in signature.parameters.items()}
        called.__annotations__ = hints | {"return": inspect.signature(function).return_annotation}
        called.__signature__ = signature.replace(  # type: ignore[attr-defined]
            return_annotation=called.__annotations__["return"]
        )
        in_words = {name: message_in_python(help, record, parameters=signature.parameters) for name, help in helps}
        lines = (f"`{name}`: {words}" for name, words in in_words.items())
        called.__doc__ = "\n\n".join((inspect.getdoc(function) or "", *lines))
        return called

    return decorate
