"""Types of click options, --trust-code and --trust-engine, checks of output paths, and the command as it was typed."""

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from corp_deploy.invocation.option import WRITTEN, Invocation, Pairs
from corp_deploy.invocation.values import ByKind, Values
from corp_deploy.spec.trusted_code import trusting_code
from corp_deploy.store.hub_snapshot import PREFIX
from ground.errors import BadInput
from ground.outputs import require_writable
from ground.places import Url, place_from_text

BASELINES = ("path", "parity")
IN_A_MODEL = ("config.json", "model.safetensors")


def _paths(context: click.Context, parameter: click.Parameter) -> Iterator[Path]:
    value = context.params.get(parameter.name or "")
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, Path) or (isinstance(each, str) and parameter.name in ("model", "dense")):
            yield Path(str(each).removeprefix(PREFIX))


def _beside(context: click.Context, output: Path) -> Iterator[Path]:
    """Yield the files that a command writes in addition to `output`, beside it or in it."""
    match context.command.name:
        case "verify":
            yield output.with_suffix(".npz")
        case "calibrate":
            parts = [*(context.params["snapshots"] or ()), *["held-out"] * (context.params["hold_out"] is not None)]
            yield from (output.with_name(f"{output.stem}.{part}{output.suffix}") for part in parts)
        case "reduce":
            yield from (output / name for name in IN_A_MODEL)
            if context.params["polish"] is not None or context.params["effort"] == "thorough":
                yield output.absolute().with_name(f"{output.absolute().name}.polish-unfinished.safetensors")
        case "build":
            yield output.with_name(f"{output.name}.json")


def _is_written(context: click.Context, parameter: click.Parameter) -> bool:
    of_command = {"release": "recipe" if context.params.get("init_model") else "", "package serve": "repository"}
    others = BASELINES if context.params.get("init") else (of_command.get(context.command.name or ""),)
    return parameter.name in WRITTEN or parameter.name in others


def check_output_paths(context: click.Context) -> None:
    """Raise BadInput for a path that the command can't write to, UsageError for one that it also reads."""
    outputs = {each: [*_paths(context, each)] for each in context.command.params if _is_written(context, each)}
    for parameter, paths in outputs.items() if not context.params.get("dry_run") else ():
        for path in paths:
            require_writable(path, folder=isinstance(parameter.type, click.Path) and not parameter.type.file_okay)
            for each in _beside(context, path) if parameter.name == "output" else ():
                require_writable(each, folder=False)
    written = [path for paths in outputs.values() for path in paths]
    written += [each for path in written for each in _beside(context, path)]
    if saved_as := context.params.get("save_as"):
        written += [path / saved_as for path in written]
    sources = [path for each in context.command.params if each not in outputs for path in _paths(context, each)]
    read = sources + [path / name for path in sources if path.is_dir() for name in IN_A_MODEL]
    for path in written:
        for own in read:
            if path.exists() and own.exists() and path.samefile(own):
                raise click.UsageError(f"{path}: the result would replace what it is made from; give --output another")


class RegularPath(click.Path):
    """A click type for paths that refuses pipes, sockets and devices, which must not be read or replaced."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) == "":
            self.fail("an empty path, expected the path of a file or directory", param, ctx)
        path: Any = super().convert(value, param, ctx)
        try:
            path.exists()
        except OSError as error:
            self.fail(f"{path} can't be examined ({error.strerror})", param, ctx)
        if path.exists() and not path.is_file() and not path.is_dir():
            self.fail(f"{path} is a pipe, socket or device, expected a regular file or a directory", param, ctx)
        if (above := next((each for each in path.parents if each.exists()), None)) and not above.is_dir():
            self.fail(f"{path} stands below {above}, which is no directory", param, ctx)
        return path


class PathOrUrl(RegularPath):
    """A click type for paths as RegularPath takes them, and for URLs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        place = place_from_text(value)
        return place if isinstance(place, Url) else super().convert(value, param, ctx)


FILE = RegularPath(dir_okay=False, path_type=Path)
DIRECTORY = RegularPath(file_okay=False, path_type=Path)
ANY_PATH = RegularPath(path_type=Path)
ANY_PLACE = PathOrUrl(path_type=Path)


class Paths(click.ParamType[tuple[Path, ...]]):
    """A click type for paths separated by commas, each given once."""

    name = "file,file,..."

    def __init__(self, each: RegularPath) -> None:
        self.each = each

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Path, ...]:
        if isinstance(value, tuple):
            return value
        paths = tuple(self.each.convert(part, param, ctx) for part in str(value).split(","))
        if len(set(paths)) != len(paths):
            self.fail(f"{value!r} names a file twice", param, ctx)
        return paths


class Value(click.ParamType[Any]):
    """A click type for values of a type of invocation/values.py, or for a quantity, which parse their own texts."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.name = values.span

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.values.holds(value):
            return value
        try:
            return self.values.from_text(str(value))
        except BadInput as error:
            self.fail(str(error), param, ctx)


def _trust_code(context: click.Context, _: click.Parameter, trust: bool) -> None:
    if trust:
        context.with_resource(trusting_code(True))


def _trust_engine(context: click.Context, _: click.Parameter, trust: bool) -> None:
    if trust:
        from corp_deploy.proof.engine_trust import trusting_engines

        context.with_resource(trusting_engines(True))


TRUST_CODE: dict[str, Any] = {
    "is_flag": True,
    "expose_value": False,
    "callback": _trust_code,
    "help": "Run the code of models (module:PATH.py:FUNCTION and models reduced from it) and of metrics.",
}
trust_option = click.option("--trust-code", **TRUST_CODE)
trust_engine_option = click.option(
    "--trust-engine",
    is_flag=True,
    expose_value=False,
    callback=_trust_engine,
    help="Load .plan and .pt2 files that you did not build on this machine: they may contain code, and no check "
    "detects it.",
)


def typed_name(option: click.Option) -> str:
    return max(option.opts, key=len).lstrip("-").replace("-", "_")


def explicit_options() -> dict[str, Any]:
    """Return the values of the options that the user typed for the current command, by name with underscores.

    The value of an option that may be repeated is a list.
    """
    context = click.get_current_context()
    defaults = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return {
        typed_name(parameter): list(value) if parameter.multiple else value
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and (name := parameter.name) is not None
        and name in context.params
        and context.get_parameter_source(name) not in defaults
        and (value := context.params[name]) is not None
    }


def command_line() -> str:
    """Return the command as it was typed, for records and for messages that name a command to repeat elsewhere."""
    return " ".join(["corp-deploy", *sys.argv[1:]])


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a BadInput raised in this context into click's UsageError."""
    try:
        yield
    except BadInput as error:
        raise click.UsageError(str(error)) from None


def _as_printed(context: click.Context) -> Iterator[tuple[str, Any]]:
    explicit = explicit_options()
    for parameter in context.command.params:
        if not isinstance(parameter, click.Option) or typed_name(parameter) not in explicit:
            continue
        value, names = explicit[typed_name(parameter)], parameter.opts
        if value is False:
            value, names = True, parameter.secondary_opts
        elif isinstance(parameter.type, Value) and isinstance(parameter.type.values, ByKind):
            value = Pairs(value)
        elif isinstance(value, dict):
            value = json.dumps(value)
        yield max(names, key=len).lstrip("-"), value


def _again(without: Collection[str], added: Mapping[str, Any]) -> Invocation:
    context = click.get_current_context()
    options = dict(_as_printed(context)) | {name.replace("_", "-"): value for name, value in added.items()}
    left = {name: value for name, value in options.items() if name.replace("-", "_") not in without}
    return Invocation(command=str(context.info_name), options=left)


def current_command(**added: Any) -> str:
    """Return the current command with the options `added` as a line to type."""
    return str(_again((), added))


def current_words(without: Collection[str] = (), **added: Any) -> tuple[str, ...]:
    """Return the current command's words after the program's name, with options left out (`without`) and `added`."""
    return _again(without, added).argv[1:]
