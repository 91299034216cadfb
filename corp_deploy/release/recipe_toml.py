"""The resolved recipe of a release as TOML."""

import os
from pathlib import Path
from typing import Any

import msgspec

from corp_deploy.families import trusted_code

from .recipe import Recipe
from .rendering import toml_from

HEAD = "# The resolved recipe of this release: every key with its value, defaults included."


def relative_text(path: Path, directory: Path) -> str:
    """A path as a recipe in the directory writes it: with a slash in it, so that it is no name of a model."""
    relative = Path(os.path.relpath(path, directory.resolve())).as_posix()
    return relative if "/" in relative else f"./{relative}"


def _set(value: Any) -> Any:
    """Without the keys that nothing is set for; TOML has no word for them."""
    if isinstance(value, dict):
        return {key: _set(each) for key, each in value.items() if each is not None}
    return value


def text_of_recipe(recipe: Recipe, directory: Path) -> str:
    """The whole recipe with its defaults, paths relative to `directory`; it reads back as the same recipe there."""
    content = msgspec.to_builtins(recipe, enc_hook=lambda path: relative_text(path, directory))
    if recipe.model.directory is not None:
        content["model"]["model"] = f"{recipe.model.prefix}{relative_text(recipe.model.directory, directory)}"
    if recipe.model.code is not None:
        function = recipe.model.model.rpartition(":")[2]
        content["model"]["model"] = f"{trusted_code.PREFIX}{relative_text(recipe.model.code, directory)}:{function}"
    return f"{HEAD}\n\n{toml_from(_set(content))}"
