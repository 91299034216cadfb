"""The resolved recipe of a release as TOML."""

import os
from pathlib import Path
from typing import Any

import msgspec

from corp_deploy.families import trusted_code

from .recipe import Recipe
from .recipe_tables import ModelTable
from .rendering import toml_from

HEAD = "# The resolved recipe of this release: every key with its value, defaults included."
HEAD_OF_MODEL = "# A model with all that goes with its name: give this file wherever a model is named, or in a recipe."


def relative_text(path: Path, directory: Path) -> str:
    """A path as a recipe in the directory writes it: with a slash in it, so that it is no name of a model."""
    relative = Path(os.path.relpath(path, directory.resolve())).as_posix()
    return relative if "/" in relative else f"./{relative}"


def _content(table: msgspec.Struct, directory: Path) -> Any:
    """Without the keys that nothing is set for; TOML has no word for them."""

    def set_in(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: set_in(each) for key, each in value.items() if each is not None}

    return set_in(msgspec.to_builtins(table, enc_hook=lambda path: relative_text(path, directory)))


def _model_content(model: ModelTable, directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = _content(model, directory)
    if model.directory is not None:
        content["model"] = f"{model.prefix}{relative_text(model.directory, directory)}"
    if model.code is not None:
        function = model.model.rpartition(":")[2]
        content["model"] = f"{trusted_code.PREFIX}{relative_text(model.code, directory)}:{function}"
    return content


def text_of_model(model: ModelTable, directory: Path) -> str:
    """The table of a model alone, paths relative to `directory`: it names the model there."""
    return f"{HEAD_OF_MODEL}\n\n{toml_from({'model': _model_content(model, directory)})}"


def text_of_recipe(recipe: Recipe, directory: Path) -> str:
    """The whole recipe with its defaults, paths relative to `directory`; it reads back as the same recipe there."""
    content = _content(recipe, directory) | {"model": _model_content(recipe.model, directory)}
    return f"{HEAD}\n\n{toml_from(content)}"
