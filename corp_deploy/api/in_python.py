"""A public function of what a record declares, its parameters with their types, defaults and help; and what messages
say of options, said in Python: they are worded for commands, and functions raise them too.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from corp_deploy.invocation.calibration import CalibrateOptions
from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.inputs import Drawn, HoldOutOptions
from corp_deploy.invocation.option import WRITTEN, Option, Record, options_of
from corp_deploy.invocation.proof import ProofOptions
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.invocation.source import Source
from corp_deploy.invocation.values import DIRECTORY, FLAG, ByKind, OneOf, Values
from ground.errors import BadInput, Missing
from ground.outputs import require_writable

P = ParamSpec("P")
R = TypeVar("R", bound=Record)
T = TypeVar("T")
FUNCTIONS: Mapping[str, tuple[type[Record], ...]] = {
    "calibrate": (CalibrateOptions, Drawn),
    "reduce": (ReduceOptions, HoldOutOptions, Drawn),
    "export": (ExportOptions, Drawn),
    "verify": (ProofOptions, HoldOutOptions, Drawn),
    "bench": (BenchOptions,),
}
INPUTS = ("images", "text", "arrays", "tokens")
_OPTION = re.compile(r"--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?: (?!--)('[^']*'|[^\s'(`]+))?")
_NAMED = re.compile(r"model (\S+) `Source\(")
_CALL = re.compile(rf"(?:corp-deploy )?\b({'|'.join(FUNCTIONS)})((?: `[^`]+`)+)")
_BEFORE = re.compile(rf"\b({'|'.join(FUNCTIONS)})(?: --[^,;()]*)? $")
_AGAIN = re.compile(r"`inputs`(?:,? (?:or|and)|,| \(or) `inputs`\)?")
_END = re.compile(r"[,;:.)]*$")


def _typed(records: Collection[type[Record]]) -> dict[str, Option]:
    """Their options by what a command calls them."""
    return {each.typed.replace("_", "-"): each for record in records for each in options_of(record).values()}


def _written(values: Values, text: str) -> str | None:
    """A value as Python has it; None for a word with which the sentence goes on."""
    bare = text.strip("'")
    if re.fullmatch(r"[A-Z][A-Z:.]*", bare):
        return bare
    if text == bare and bare.isalpha() and bare != "auto" and not isinstance(values, OneOf | ByKind):
        return None
    try:
        values.from_text(bare)
    except BadInput:
        return None
    return bare if re.fullmatch(r"[\d.e-]+|\{.*\}", bare) else repr(bare)


def _argument(options: Mapping[str, Option], name: str, text: str) -> tuple[str, str] | None:
    """The parameter, with its value where one follows, and what is left of the text; None where it is none of these."""
    option = options.get(name)
    if option is None:
        negated = options.get(name.removeprefix("no-"))
        return None if negated is None else (f"{negated.name}=False", text)
    if option.of is FLAG:
        return f"{option.name}=True", text
    value = _written(option.of, text) if text else None
    return (option.name, text) if value is None else (f"{option.name}={value}", "")


def _called(name: str, *arguments: str) -> str:
    return f"`{name}({', '.join(each if '=' in each else f'{each}=...' for each in arguments)})`"


def _spelled(name: str, text: str, own: Mapping[str, Option], parameters: Collection[str]) -> tuple[str, str]:
    """An option as one of a function's `own`, else as what says the same in Python; what is left of the text."""
    if found := _argument(own, name, text):
        return f"`{found[0]}`", found[1]
    if name in INPUTS:
        return "`inputs`", text
    if name == "model":
        return name, text
    parameter = name.replace("-", "_")
    if name.startswith("trust-"):
        trust = f"{parameter}=True"
        return (f"`{trust}`" if parameter in parameters else _called("Source", trust)), text
    if parameter in parameters:
        return f"`{parameter}`", text
    functions: dict[str, tuple[type[Record], ...]] = {"Source": (Source,), **FUNCTIONS}
    for function, records in functions.items():
        if found := _argument(_typed(records), name, text):
            return _called(function, found[0]), found[1]
    return f"the commands' option {parameter!r}", text


def in_python(message: str, *records: type[Record], parameters: Collection[str] = ()) -> str:
    """A message with parameters where it has options: those of these records first, `parameters` beside them."""
    of_function = _typed(records)

    def option(found: re.Match[str]) -> str:
        following, command = found[2] or "", _BEFORE.search(found.string[: found.start()])
        own = _typed(FUNCTIONS[command[1]]) if command else of_function
        end = "" if following.startswith("'") else re.findall(_END, following)[0]
        text, left = _spelled(found[1], following.removesuffix(end), own, parameters)
        return f"{text} {left}{end}" if left else text + end

    text = _CALL.sub(lambda found: _called(found[1], *re.findall(r"`([^`]+)`", found[2])), _OPTION.sub(option, message))
    text = _NAMED.sub(r"`Source(\1, ", re.sub(r" \(recipes: [^)]*\)", "", text))
    while _AGAIN.search(text):
        text = _AGAIN.sub("`inputs`", text)
    return text


@contextmanager
def speaking_python(*records: type[Record], parameters: Collection[str] = ()) -> Iterator[None]:
    """Within it errors speak of parameters, see in_python."""
    try:
        yield
    except (BadInput, Missing) as error:
        error.args = (in_python(str(error), *records, parameters=parameters),)
        raise


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
                for name in WRITTEN:
                    if kept.get(name) is not None:
                        require_writable(Path(kept[name]), folder=options_of(record)[name].of is DIRECTORY)
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
