"""Reading of recipes from TOML files and from the files that these extend; messages name the file and the key."""

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from corp_deploy.invocation.engine import TargetName
from corp_deploy.invocation.option import Record, options_of
from corp_deploy.invocation.option_support import spelled
from corp_deploy.invocation.source import ModelSource
from corp_deploy.spec import trusted_code
from corp_deploy.spec.trusted_code import file_and_function, is_code
from corp_deploy.store.hub_snapshot import PREFIX
from ground.errors import BadInput
from ground.files import refuse_utf16, regular_file
from ground.places import Place, Url

from .recipe import SECTIONS, Recipe
from .recipe_keys import errors_at, keys_of, record_of
from .recipe_tables import ModelTable, TargetTable

MOST_BYTES = 2**20
DEEPEST = 40
S = TypeVar("S", bound=ModelSource)
Tables = dict[str, dict[str, Any]]


def _text(path: Path) -> str:
    try:
        size = regular_file(path).stat().st_size
        if size <= MOST_BYTES:
            return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if path.name.endswith(".model.toml"):
            when = "calibrate writes it beside its moments, of a model that is named with weights or other options"
            raise BadInput(f"{path}: no such file; {when}") from None
        raise BadInput(f"{path}: no such recipe; write one with: corp-deploy release {path} --init MODEL") from None
    except UnicodeDecodeError as error:
        refuse_utf16(error.object, str(path))
        raise BadInput(f"{path}: can't be read ({error})") from None
    except OSError as error:
        raise BadInput(f"{path}: can't be read ({error})") from None
    raise BadInput(f"{path}: {size} bytes, a recipe has {MOST_BYTES} at most")


def _read(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        raw = tomllib.loads(text)
        if _depth(raw) > DEEPEST:
            raise RecursionError
    except RecursionError:
        raise BadInput(f"{path}: not a recipe: its values are nested too deep") from None
    except ValueError as error:
        raise BadInput(f"{path}: not TOML: {error}") from None
    return raw


def _depth(value: object) -> int:
    """Return the depth of nested tables and lists; a single line of dotted keys can nest very many."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _refuse_unknown(where: str, words: Iterable[str], allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    for word in words:
        if word not in allowed:
            close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(allowed)}"
            raise BadInput(f"{where}: unknown key {word!r}; {hint}")


def _model_text(folder: Path, model: str) -> str:
    """Return a model's name with its path, if it has one, made absolute from `folder`."""
    if is_code(model):
        path, function = file_and_function(model)
        return f"{trusted_code.PREFIX}{(folder / path).resolve()}:{function}"
    if model.startswith(PREFIX):
        return f"{PREFIX}{(folder / model.removeprefix(PREFIX)).resolve()}"
    model = model.removeprefix("local-dir:")
    beside = folder / model
    if ":" in model and not beside.is_dir():
        return model
    return str(beside.resolve()) if "/" in model or beside.is_dir() else model


def _table(path: Path, name: str, raw: object, kind: type[Record]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise BadInput(f"{path}: {name} is {raw!r:.200}, expected a table: [{name}]")
    keys = keys_of(kind)
    _refuse_unknown(f"{path}: [{name}]", raw, keys)
    with errors_at(str(path)):
        return {word: keys[word].decoded(name, value, path.parent) for word, value in raw.items()}


def _tables(path: Path, raw: Mapping[str, Any]) -> Tables:
    """Return the tables of one file, checked and decoded, by name; that of a target is named targets.NAME."""
    _refuse_unknown(str(path), raw, ("extends", *SECTIONS, "targets"))
    tables = {name: _table(path, name, raw[name], kind) for name, kind in SECTIONS.items() if name in raw}
    if "model" in tables.get("model", {}):
        tables["model"]["model"] = _model_text(path.parent, tables["model"]["model"])
    targets = raw.get("targets", {})
    if not isinstance(targets, dict):
        raise BadInput(f"{path}: targets is {targets!r}, expected tables such as [targets.onnxruntime-cpu]")
    _refuse_unknown(f"{path}: [targets]", targets, get_args(TargetName))
    for name in targets:
        tables[f"targets.{name}"] = _table(path, f"targets.{name}", targets[name], TargetTable)
    return tables


def paths_in_tables(tables: Tables) -> Iterator[tuple[str, Place]]:
    """Yield pairs of a key with its table, such as calibration.images, and a path or URL among its values."""
    for name, table in tables.items():
        for word, value in table.items():
            if (name, word) == ("model", "model"):
                path = file_and_function(value)[0] if is_code(value) else Path(value.removeprefix(PREFIX))
                yield from [(f"{name}.{word}", path)] if path.is_absolute() else []
            else:
                values = value if isinstance(value, tuple) else (value,)
                yield from ((f"{name}.{word}", each) for each in values if isinstance(each, Path | Url))


def is_inside(place: Place, directory: Path) -> bool:
    return isinstance(place, Path) and place.is_relative_to(directory)


def _refuse_outside(path: Path, name: str, place: Place, bound: Path | None) -> None:
    """Raise BadInput if `place`, the value of the key `name`, is not below the directory `bound` (None: anywhere)."""
    if bound is not None and not is_inside(place, bound):
        raise BadInput(
            f"{path}: {name} leads out of {bound}, the directory of the recipe, to {str(place)[:200]}: a recipe "
            "from somebody else could read, ship or overwrite your files this way; check it, and give "
            "--trust-paths if you agree"
        )


def _with_bases(path: Path, extending: tuple[Path, ...], bound: Path | None) -> Tables:
    """Return a file's tables merged over those of the recipe that it extends; refuse paths outside `bound`."""
    if path in extending:
        raise BadInput(f"{path}: extends itself by way of {' -> '.join(each.name for each in (*extending, path))}")
    raw = _read(path)
    own = _tables(path, raw)
    for name, place in paths_in_tables(own):
        _refuse_outside(path, name, place, bound)
    if "extends" not in raw:
        return own
    base = raw["extends"]
    if not isinstance(base, str) or not base.strip() or "\0" in base:
        raise BadInput(f"{path}: extends is {base!r:.200}, expected the path of another recipe")
    place = (path.parent / base).resolve()
    _refuse_outside(path, "extends", place, bound)
    merged = _with_bases(place, (*extending, path), bound)
    return merged | {name: merged.get(name, {}) | table for name, table in own.items()}


def model_table(source: ModelSource) -> ModelTable:
    """Return the table [model] of a model named on the command line, with absolute paths."""
    weights = None if source.weights is None else Path(source.weights).resolve()
    return ModelTable(**source.values | {"weights": weights, "name": _model_text(Path.cwd(), os.fspath(source.name))})


def load_model_table(path: Path) -> ModelTable:
    """Read the table [model] of a file, which may be a whole recipe, without limits on where its paths lead.

    Raises BadInput as load_recipe does, and for a file without the table.
    """
    path = path.resolve()
    table = _with_bases(path, (), None).get("model")
    if table is None:
        raise BadInput(f"{path}: has no [model], expected the table that names a model, as in a recipe")
    with errors_at(str(path)):
        return record_of(ModelTable, "model", table)


def resolve_toml_source(source: S) -> S:
    """Return a source with the values of [model] if its name is a .toml file, else the source itself.

    Raises BadInput for options of the model beside such a file.
    """
    path = Path(source.name)
    if path.suffix != ".toml":
        return source
    if source.non_default:
        others = ", ".join(spelled(options_of(ModelSource)[name].typed) for name in source.non_default)
        raise BadInput(f"{path}: has the model's options in [model]; leave {others} out, or change [model]")
    return replace(source, **load_model_table(path).values)


def load_recipe(path: Path, *, trust_paths: bool = False) -> Recipe:
    """Read a recipe with the recipes that it extends; with `trust_paths` its paths may lead out of its directory.

    The files that it names need not exist: recipe_checks.require_inputs checks that.

    Raises BadInput, naming the file and the key, for unknown keys and wrong values.
    """
    path = path.resolve()
    tables = _with_bases(path, (), None if trust_paths else path.parent)
    tables["release"] = {"name": path.stem} | tables.get("release", {})
    with errors_at(str(path)):
        sections: dict[str, Any] = {
            name: record_of(kind, name, tables.get(name, {})) for name, kind in SECTIONS.items()
        }
        if targets := [name for name in tables if name not in SECTIONS]:
            own = {name.removeprefix("targets."): record_of(TargetTable, name, tables[name]) for name in targets}
            sections["target_tables"] = own
        return Recipe(**sections)
