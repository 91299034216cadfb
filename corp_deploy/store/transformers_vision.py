"""A vision transformer as transformers leaves it in a directory, read as timm's model of the same architecture."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from corp_deploy.families.architecture import Architecture, Preprocessing
from corp_deploy.families.hf_config import Sides, VisionModel, both, vision_model
from corp_deploy.families.hf_names import state_from_transformers, with_positions_of
from corp_deploy.families.hf_preprocessing import Prepared, prepared, timm_arguments, timm_name
from corp_deploy.families.hf_saved import own_config, written_again
from ground.records import record_from_file

from .checkpoint import Checkpoint, dense_from_architecture, load_weights
from .hub_snapshot import CONFIG, ORIGIN, changes_of, config_of_transformers, weights_of_transformers
from .weights import State, first_names, read_weights

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"


TAKES = "a vision model of transformers takes img_size, and num_classes 0 for the tower without its head"


class _Changes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What --model-kwargs may say otherwise than the directory."""

    img_size: Sides | None = None
    num_classes: Literal[0] | None = None

    @property
    def sides(self) -> tuple[int, int] | None:
        return None if self.img_size is None else both(self.img_size)


def _preparation(directory: Path, model: VisionModel) -> tuple[Prepared, str, Mapping[str, Any]]:
    """The preparation with the file that says it, and that file's content."""
    for name in (PREPROCESSOR, PROCESSOR):
        if not (directory / name).is_file():
            continue
        content = record_from_file(directory / name, dict[str, Any])
        content = content.get("image_processor", {}) if name == PROCESSOR else content
        if isinstance(content, Mapping) and content:
            return prepared(content, model, where=str(directory / name)), name, content
    source = f"transformers' default of {model.architecture}, as there is no {PREPROCESSOR}"
    return prepared({}, model, where=f"{directory}: no {PREPROCESSOR}"), source, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What a directory's configuration says; `source`: the file that says how images are prepared, in its `content`."""

    config: Mapping[str, Any]
    model: VisionModel
    prepared: Prepared
    source: str
    content: Mapping[str, Any]
    sides: tuple[int, int]
    architecture: Architecture


def _notes(read: _Read, beside: State, file: Path) -> tuple[str, ...]:
    """What whoever loads the model should hear."""
    model, sides, own, resized = read.model, read.sides, read.model.config.sides, read.prepared.sides
    timms = "Eva" if model.config.has_rope else "VisionTransformer"
    notes = [f"{CONFIG}: read as timm's {timms}; its output is {model.output_name} of {model.architecture}"]
    if sides != own and not model.config.has_rope:
        notes.append(
            f"{file.name}: positions resampled from images of {own[0]}x{own[1]} to {sides[0]}x{sides[1]}, as "
            "transformers does"
        )
    if read.content and sides != resized:
        notes.append(
            f"{read.source}: makes images of {resized[0]}x{resized[1]}; they are made {sides[0]}x{sides[1]} here"
        )
    if beside:
        notes.append(f"{file.name}: not used: {first_names(sorted(beside))}")
    return tuple(notes)


def _read(directory: Path, kwargs: Mapping[str, Any], preprocessing: Preprocessing | None) -> _Read:
    changes, config = changes_of(kwargs, _Changes, TAKES), config_of_transformers(directory)
    model = vision_model(config, where=str(directory / CONFIG), without_head=changes.num_classes == 0)
    preparation, source, content = _preparation(directory, model)
    # As asked for; as they are prepared where the model's class takes any size; else those of its positions.
    takes_any = model.config.model_type.startswith(("dinov2", "dinov3")) and bool(content)
    sides = changes.sides or (preparation.sides if takes_any else model.config.sides)
    settings = (preprocessing or Preprocessing()).for_channels(model.config.num_channels).settings
    architecture = Architecture(
        name=timm_name(model),
        kwargs=timm_arguments(model, sides),
        preprocessing=Preprocessing(**{**preparation.preprocessing.settings, **settings}),
    )
    return _Read(
        config=config,
        model=model,
        prepared=preparation,
        source=source,
        content=content,
        sides=sides,
        architecture=architecture,
    )


def vision_architecture(
    directory: Path, kwargs: Mapping[str, Any], preprocessing: Preprocessing | None
) -> Architecture:
    """Of a directory with or without weights. Raises BadInput as load_vision does."""
    return _read(directory, kwargs, preprocessing).architecture


def load_vision(
    directory: Path, kwargs: Mapping[str, Any] = MappingProxyType({}), preprocessing: Preprocessing | None = None
) -> Checkpoint:
    """The vision tower in a directory. Nothing is executed, nothing looked for on a network.

    `kwargs`: img_size, and num_classes 0 for a tower without its head; `preprocessing` goes before the directory's.

    Raises BadInput for a model that timm's VisionTransformer can't be, and for weights that are missing, pickled or
    another model's.
    """
    own = _read(directory, kwargs, preprocessing)
    model, file = own.model, weights_of_transformers(directory)
    read = read_weights(file)
    mapped = state_from_transformers(read.state, model, where=str(file))
    state = with_positions_of(mapped.state, model, own.sides)
    built = dense_from_architecture(own.architecture)
    load_weights(built, state, where=file)
    notes = (*read.notes, *_notes(own, mapped.beside, file))
    source = {
        "weights": file.name,
        "notes": list(notes),
        "preprocessing": own.source,
        "class": model.architecture,
        "output": model.output_name,
        ORIGIN: {
            "config": own_config(own.config, model),
            "preprocessor": dict(own.content) if own.sides == own.prepared.sides else {},
        },
    }
    lineage = {"source": source}
    unread = written_again(mapped.beside)
    return Checkpoint(model=built, architecture=own.architecture, lineage=lineage, notes=notes, unread=unread)
