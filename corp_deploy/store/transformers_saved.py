"""A reduced vision model as a plain directory of transformers, which loads there without this package."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from corp_deploy.families.family import family_of, image_spec
from corp_deploy.families.hf_config import VisionModel, vision_model
from corp_deploy.families.hf_saved import INSTEAD, Saved, saved
from ground.errors import BadInput
from ground.files import replacing, write_json

from .checkpoint import WEIGHTS, Checkpoint
from .hub_snapshot import CONFIG
from .transformers_vision import ORIGIN, PREPROCESSOR

FOLDER = "hf"
"""Beside model.safetensors and config.json of a model directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a model was read from: its configuration, as the class of its tower has it, and its preprocessing."""

    model: VisionModel
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]


def origin_of(checkpoint: Checkpoint) -> Origin:
    """Raises BadInput for a model that was read from anything else than a vision model of transformers."""
    origin = dict(checkpoint.lineage.get("source", {})).get(ORIGIN)
    if not isinstance(origin, Mapping) or not isinstance(origin.get("config"), Mapping):
        raise BadInput(
            "--save-as hf: this model has no class of transformers; expected a vision model read by --model hf:DIR, or "
            "a directory of corp-deploy made of one"
        )
    model = vision_model(origin["config"], where=f"{CONFIG}: lineage: source")
    return Origin(model=model, config=origin["config"], preprocessor=origin.get("preprocessor") or {})


def transformers_form(checkpoint: Checkpoint) -> tuple[Saved, Mapping[str, Any]]:
    """The model as its class of transformers has it, and its preprocessing.

    Raises BadInput, naming the site, for what a configuration can't say.
    """
    origin = origin_of(checkpoint)
    if family_of(checkpoint.model).merging_of(checkpoint.model) is not None:
        raise BadInput(f"--save-as hf: {origin.model.architecture} merges no tokens; {INSTEAD}")
    _, height, width = image_spec(checkpoint.model).shape
    form = saved(checkpoint.model, origin.model, origin.config, (height, width), checkpoint.unread)
    return form, origin.preprocessor


def write_transformers(form: Saved, preprocessor: Mapping[str, Any], directory: Path) -> None:
    """Write model.safetensors, config.json and, where it is known, preprocessor_config.json.

    The configuration goes first and comes last: what is interrupted loads nowhere.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, PREPROCESSOR):
        (directory / name).unlink(missing_ok=True)
    with replacing(directory / WEIGHTS) as temporary:
        save_file(form.state, temporary, metadata={"format": "pt"})
    if preprocessor:
        write_json(directory / PREPROCESSOR, preprocessor)
    write_json(directory / CONFIG, form.config)
