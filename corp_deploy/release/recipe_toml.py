"""Texts of recipes: a recipe with all defaults, [model] alone, and a starter from a template. Imports no torch."""

import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import Environment

from corp_deploy.families.timm_names import is_timm_name, look_alikes, require_local_name
from corp_deploy.spec import trusted_code
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.hub_snapshot import config_of_directory, is_ours, model_of_snapshot, refuse_beside_directory
from corp_deploy.store.model_config import load_model_config
from ground.errors import BadInput
from ground.pictures import pictures_below
from ground.places import Place, Url
from ground.templates import template_environment
from ground.text import comment_line, printable

from .digests import files_of
from .recipe import SECTIONS, Recipe
from .recipe_keys import content_of, relative_text
from .recipe_tables import ModelTable


def toml_from(content: Mapping[str, Any]) -> str:
    """Return TOML in which control characters and other invisible ones are escaped."""
    text = tomli_w.dumps(content)
    odd = {each for each in text if each != "\n" and printable(each) != each}
    return text.translate({ord(each): f"\\u{ord(each):04x}" for each in odd})


@cache
def _environment() -> Environment:

    def toml(text: str) -> str:
        return toml_from({"text": text}).removeprefix("text = ").rstrip("\n")

    environment = template_environment("corp_deploy.release")
    environment.filters |= {"toml": toml, "sh": shlex.join, "comment": comment_line}
    return environment


def rendered(template: str, **content: Any) -> str:
    return _environment().get_template(f"{template}.jinja").render(content)


HEAD = "# The resolved recipe of this release: every key with its value, defaults included."
HEAD_OF_MODEL = "# A model with all that goes with its name: give this file wherever a model is named, or in a recipe."


def _model_content(model: ModelTable, directory: Path) -> dict[str, Any]:
    content = content_of(model, directory)
    if model.directory is not None:
        content["model"] = f"{model.prefix}{relative_text(model.directory, directory)}"
    if model.code is not None:
        function = model.name.rpartition(":")[2]
        content["model"] = f"{trusted_code.PREFIX}{relative_text(model.code, directory)}:{function}"
    return content


def text_of_model(model: ModelTable, directory: Path) -> str:
    """Write the table [model] as the text of a new .toml file, with paths relative to `directory`."""
    return f"{HEAD_OF_MODEL}\n\n{toml_from({'model': _model_content(model, directory)})}"


def text_of_recipe(recipe: Recipe, directory: Path) -> str:
    """Return the text of a recipe file in `directory` with defaults, which load_recipe reads as the same recipe."""
    content = {name: content_of(getattr(recipe, name), directory) for name in SECTIONS}
    content["model"] = _model_content(recipe.model, directory)
    content["targets"] = {name: content_of(table, directory) for name, table in recipe.target_tables.items()}
    return f"{HEAD}\n\n{toml_from(content)}"


HOLD_OUT = 128
"""The largest number of calibration images that a starter recipe holds out if there is no held-out set."""


def _describe_directory(folder: Path) -> tuple[str, Architecture | None]:
    """Return a description of the model in a directory, and timm's architecture if it is a model of timm."""
    config = config_of_directory(folder)
    if not is_ours(config):
        name, kwargs, _ = model_of_snapshot(folder, config)
        return name, Architecture(name=name, kwargs=kwargs)
    ours = load_model_config(folder)
    description = f"{ours.built.name}, images {'x'.join(map(str, ours.input.shape))}, {len(ours.sites)} sites"
    timms = Architecture(name=ours.built.name, kwargs=ours.built.kwargs) if ours.family == "timm" else None
    return description, timms


def _has_kinds(architecture: Architecture) -> tuple[bool, bool]:
    """Return two flags: the model has sites between convolutions, and it has MLPs or heads (or no sites)."""
    import torch

    from corp_deploy.families.family import CONVOLUTIONS, HEADS, MLPS, kinds_of
    from corp_deploy.store.checkpoint import dense_from_architecture

    with torch.device("meta"):
        dense = dense_from_architecture(architecture)
    kinds = kinds_of(dense)
    return CONVOLUTIONS in kinds, not kinds or bool(kinds & {MLPS, HEADS})


def require_named(options: Mapping[str, Place | None]) -> None:
    """Raise BadInput for an option whose file or folder, for the new recipe, is absent or empty."""
    for option, path in options.items():
        if isinstance(path, Path) and not files_of(path) and not (path.is_dir() and any(path.iterdir())):
            raise BadInput(
                f"{option} {path}: not there, or empty; give what is there, or leave it out and edit the recipe"
            )


def starter(
    model: str,
    path: Path,
    *,
    weights: Path | None = None,
    images: Place | None,
    held_out: Place | None,
    labels: Path | None,
) -> str:
    """Return the text of a commented recipe at `path` for a model directory, or for a timm name with its weights.

    With `images` and no `held_out`, some of the images prove the result.

    Raises BadInput for another model, and for weights beside a directory that has weights.
    """

    def placed(place: Place) -> str:
        return place if isinstance(place, Url) else relative_text(place.resolve(), path.parent)

    folder = Path(model.removeprefix("local-dir:"))
    description: str = ""
    architecture: Architecture | None = Architecture(name=model)
    if folder.is_dir():
        if is_ours(config_of_directory(folder)):
            refuse_beside_directory(folder, {"--weights": weights})
        description, architecture = _describe_directory(folder)
    else:
        require_local_name(model)
        if not is_timm_name(model):
            raise BadInput(f"--init {model}: neither a model directory nor a timm name; {look_alikes(model)}")
    convolutions, linear = (False, True) if architecture is None else _has_kinds(architecture)
    # Half of a folder at most; the number of images in other files isn't known here.
    pictures = pictures_below(images)[0] if isinstance(images, Path) and images.is_dir() else ()
    count = max(len(pictures) // 2, 1) if pictures else HOLD_OUT

    return rendered(
        "starter.toml",
        file=path.name,
        name=path.stem,
        model=model,
        directory=placed(folder) if folder.is_dir() else None,
        description=description,
        convolutions=convolutions,
        linear=linear,
        weights=None if weights is None else placed(weights),
        images=placed(images or path.parent / "images" / "calibration"),
        hold_out=min(HOLD_OUT, count) if images is not None and held_out is None else None,
        held_out=placed(held_out or path.parent / "images" / "held-out"),
        labels=None if labels is None else placed(labels),
        served=re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip("_.-") or "model",
    )
