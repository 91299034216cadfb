"""The decorator `command`, which makes a click command of a function, and ModelChoice, the model of a command.

A parameter of the function that is annotated with a Record (see invocation/option.py) or ModelChoice gets the options
that the record declares, and the command calls the function with the record. The function returns the exit code, None
for 0.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import click

from corp_deploy.invocation.option import NEEDED, Record, options_of
from corp_deploy.invocation.option import Option as Declared
from corp_deploy.invocation.option_support import spelled
from corp_deploy.invocation.source import ModelSource
from corp_deploy.invocation.values import FLAG, OneOf, Repeated, Values
from corp_deploy.views.console import Output
from corp_deploy.views.waiting import Waiting

from .help import Command, Headed
from .options import (
    ANY_PATH,
    ANY_PLACE,
    DIRECTORY,
    FILE,
    TRUST_CODE,
    Value,
    check_output_paths,
    explicit_options,
    usage_errors,
)

if TYPE_CHECKING:
    from corp_deploy.store.checkpoint import Checkpoint


MODEL_HELP = (
    "A timm name (with --weights), a directory written by corp-deploy, a snapshot of a timm repository, hf:DIR, a "
    "vision transformer, text encoder or decoder of transformers, torchvision:vit_b_16 and its like "
    "(with --weights), module:PATH.py:FUNCTION (with --trust-code), or a .toml file with [model] that says all of "
    "it: a recipe, or what calibrate writes beside its moments."
)


class ModelChoice(ModelSource):
    """A model on the command line, which prints the notes on its weights when it is loaded."""

    @property
    def model(self) -> str:
        return os.fspath(self.name)

    def look(self, out: Output) -> "Checkpoint":
        """Return the model for inspection, loaded without weights if none are given and it comes without any."""
        from corp_deploy.store.dense_model import comes_with_weights, load_without_weights

        if self.weights is not None or comes_with_weights(self.model):
            return self.load(out)
        out.note(f"{self.model}: without weights, as none are given")
        return load_without_weights(self.model, self.kwargs or {}, self.preprocessing, self.named_outputs)

    def load(self, out: Output) -> "Checkpoint":
        checkpoint = self.opened()
        for note in checkpoint.notes:
            out.note(note)
        return checkpoint


def chosen_model(model: str | Path, **options: Any) -> ModelChoice:
    with usage_errors():
        choice = ModelChoice(model, **options)
    if Path(model).suffix != ".toml":
        return choice
    from corp_deploy.release.recipe_file import resolve_toml_source

    return resolve_toml_source(choice)


@contextmanager
def as_directory(path: Path, out: Output) -> Iterator[Path]:
    """Yield the path, or for a .toml file with [model] a temporary directory that the model is saved to."""
    if path.suffix != ".toml":
        yield path
        return
    from corp_deploy.store.checkpoint import save

    with TemporaryDirectory() as scratch:
        save(chosen_model(path).load(out), Path(scratch) / path.stem)
        yield Path(scratch) / path.stem


PLACES: dict[str, click.ParamType[Any]] = {
    "FILE": FILE,
    "DIRECTORY": DIRECTORY,
    "PATH": ANY_PATH,
    "PATH|URL": ANY_PLACE,
}
Callback = Callable[..., int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Some:
    """The selection of a record's options for a command: those in `only` (all if empty), some with other help texts."""

    only: tuple[str, ...] = ()
    helps: Mapping[str, str] = field(default_factory=dict)


def some(*only: str, **helps: str) -> Some:
    return Some(only=only, helps=helps)


def _type(values: Values) -> click.ParamType[Any]:
    return click.Choice(values.words) if isinstance(values, OneOf) else PLACES.get(values.span) or Value(values)


def _option(declared: Declared) -> click.Option:
    name, of, default = spelled(declared.typed), declared.of, declared.default
    names, shown = [name, declared.name], declared.unset or default not in (None, (), NEEDED)
    arguments: dict[str, Any] = {"type": _type(of), "show_default": shown}
    # To click an option with a default, even None, is never missing.
    arguments |= {"required": True} if default is NEEDED else {"default": default}
    if of is FLAG:
        names[0] = name if default is False else f"{name}/--no{name[1:]}"
        arguments = {"default": default, "is_flag": True}
    elif isinstance(of, Repeated):
        arguments |= {"type": _type(of.each), "default": default or None, "multiple": True}
    elif isinstance(default, tuple):
        arguments["default"] = ",".join(map(str, default)) or None
    if declared.flag_value is not None:
        arguments |= {"is_flag": False, "flag_value": declared.flag_value}
    names += ["-o"] * (name == "--output")
    return Headed(names, heading=declared.heading, help=declared.help, **arguments)


def _options_from(record: type[Record], which: Some) -> list[click.Option]:
    return [
        _option(replace(each, help=which.helps.get(name, each.help)))
        for name, each in options_of(record, *which.only).items()
    ]


def _built(record: type[Record], **values: Any) -> Record:
    with usage_errors():
        value = record(**values)
    value.refuse_ignored(explicit_options())
    return value


def _output(as_json: bool, quiet: bool) -> Output:
    context = click.get_current_context()
    check_output_paths(context)
    return Output(json=as_json, quiet=quiet, waiting=context.obj or Waiting())


def _flag(*names: str, help: str) -> click.Option:
    return Headed(names, heading="Output", is_flag=True, help=help)


Built = tuple[Callable[..., Any], list[click.Parameter]]


def _value_options(parameter: Parameter, *, named: bool) -> Built | None:
    """Return the function that makes a parameter's value, and the click options for the function's arguments.

    Return None for a parameter that click passes itself. `named` is True if the model is an argument of the command
    instead of the option --model.
    """
    annotation, which = parameter.annotation, Some()
    if get_origin(annotation) is Annotated:
        annotation, which = get_args(annotation)
    if annotation is Output:
        as_json = _flag("--json", "as_json", help="Print the result as JSON on stdout.")
        return _output, [as_json, _flag("--quiet", "-q", help="No progress, no table; errors and warnings still show.")]
    if annotation is ModelChoice:
        model = [] if named else [click.Option(["--model"], required=True, help=MODEL_HELP)]
        return chosen_model, [*model, click.Option(["--trust-code"], **TRUST_CODE), *_options_from(ModelSource, which)]
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return (lambda **values: _built(annotation, **values)), [*_options_from(annotation, which)]
    return None


def command(name: str | None = None, *, first: str = "", **attributes: Any) -> Callable[[Callback], Command]:
    """Return a decorator that makes a command of a function, with options in the order of its parameters.

    Options of click's own decorators come where the function has their parameters; those without a parameter come next
    to the option that they are declared before. `first` lists the options that --help shows, see Command.
    """

    def decorate(function: Callback) -> Command:
        own: list[click.Parameter] = getattr(function, "__click_params__", [])[::-1]
        makers, parameters = dict[str, tuple[Callable[..., Any], list[str]]](), list[click.Parameter]()
        for parameter in signature(function).parameters.values():
            names = [each.name for each in own]
            is_own = parameter.name in names
            until = names.index(parameter.name) + 1 if is_own else len(own) * (parameter.annotation is Output)
            parameters += own[:until]
            del own[:until]
            if (built := _value_options(parameter, named=is_own)) is not None:
                make, options = built
                parameters += options
                named = [parameter.name] * is_own
                makers[parameter.name] = make, named + [str(each.name) for each in options if each.expose_value]

        @wraps(function)
        def called(**values: Any) -> int | None:
            for each, (make, names) in makers.items():
                values[each] = make(**{name: values.pop(name) for name in names})
            return function(**values)

        called.__click_params__ = parameters[::-1]  # type: ignore[attr-defined]
        return click.command(name, cls=Command, first=first, **attributes)(called)

    return decorate
