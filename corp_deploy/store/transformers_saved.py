"""A reduced model as a plain directory of transformers, which loads there without this package."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file

from corp_deploy.families import decoder, decoder_saved, hf_saved, traced_model
from corp_deploy.families.bert import MODEL_TYPES
from corp_deploy.families.family import image_spec
from corp_deploy.families.hf_config import VisionModel, vision_model
from corp_deploy.families.hf_saved import Saved
from corp_deploy.families.sentence_files import FILES, require_decoder_files, require_sentence_files
from corp_deploy.spec.widths import Widths
from corp_deploy.traced.models.sites import Sites
from ground.errors import BadInput
from ground.files import write_json
from ground.records import record_from_value
from ground.transaction import replacing_files

from .checkpoint import WEIGHTS, Checkpoint
from .hub_snapshot import CONFIG, ORIGIN
from .transformers_directory import PREPROCESSOR
from .weight_file import first_names

AGAIN = "write the model again"
BESIDE = (PREPROCESSOR, *FILES)
"""What would be read of an older model's files where a new one has none."""
FOLDER = "hf"
"""Beside model.safetensors and config.json of a model directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Of a vision model: its configuration, as the class of its tower has it, and its preprocessing."""

    model: VisionModel
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]

    @property
    def files(self) -> Mapping[str, Any]:
        return {PREPROCESSOR: self.preprocessor} if self.preprocessor else {}

    def refuse_unsayable(self, sites: Sites, widths: Widths) -> None:
        hf_saved.refuse_unsayable(self.model, {**sites.widths, **widths})

    def saved(self, checkpoint: Checkpoint) -> Saved:
        if traced_model.merging_of(checkpoint.model) is not None:
            raise BadInput(f"--save-as hf: {self.model.architecture} merges no tokens; {hf_saved.INSTEAD}")
        _, height, width = image_spec(checkpoint.model).shape
        return hf_saved.saved(checkpoint.model, self.model, self.config, (height, width), checkpoint.unread)


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """Of a text encoder: its configuration, its name in its class, what its file had `beside` it, by name, and the
    files of its tokenizer and pooling.
    """

    config: dict[str, Any]
    prefix: str
    beside: tuple[str, ...]
    files: dict[str, Any]

    def refuse_unsayable(self, sites: Sites, widths: Widths) -> None:
        decoder_saved.refuse_unsayable_encoder(self.config, {**sites.widths, **widths})

    def saved(self, checkpoint: Checkpoint) -> Saved:
        return decoder_saved.saved_encoder(checkpoint.model, self.config, self.prefix, checkpoint.unread)


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """Of a decoder: its configuration, and what stands beside its tokenizer.json, by name."""

    config: dict[str, Any]
    files: dict[str, Any]

    def refuse_unsayable(self, sites: Sites, widths: Widths) -> None:
        decoder_saved.refuse_unsayable(self.config, decoder_saved.sayable_widths(self.config, sites, widths))

    def saved(self, checkpoint: Checkpoint) -> Saved:
        return decoder_saved.saved(checkpoint.model, self.config)


Origin = Tower | Encoder | Decoder
"""What a model was read from, as its class of transformers has it: `files`, the content of what stands beside
configuration and weights, by path; `refuse_unsayable` raises BadInput, naming the site, for widths asked for, or those
of the other sites, that the configuration can't say; `saved`, the model as that class has it.
"""


def origin_of(checkpoint: Checkpoint) -> Origin:
    """Raises BadInput for a model of no directory of transformers, or whose class has tensors that aren't at hand."""
    origin = dict(checkpoint.lineage.get("source", {})).get(ORIGIN)
    if not isinstance(origin, Mapping) or not isinstance(origin.get("config"), Mapping):
        raise BadInput(
            "--save-as hf: this model has no class of transformers; expected one read by --model hf:DIR, or a "
            "directory of corp-deploy made of one"
        )
    config, where = origin["config"], f"{CONFIG}: lineage: source"
    if config.get("model_type") in MODEL_TYPES:
        encoder = record_from_value(dict(origin), Encoder, where=where, remedy=AGAIN)
        require_sentence_files(encoder.files)
        if lost := [name for name in encoder.beside if name not in checkpoint.unread]:
            raise BadInput(
                f"--save-as hf: the class has {first_names(lost)} too, which are only in the transformers directory "
                "that the encoder was read from; give --model hf:DIR for that one"
            )
        return encoder
    if config.get("model_type") in decoder.MODEL_TYPES:
        text_decoder = record_from_value(dict(origin), Decoder, where=where, remedy=AGAIN)
        require_decoder_files(text_decoder.files)
        return text_decoder
    return Tower(model=vision_model(config, where=where), config=config, preprocessor=origin.get("preprocessor") or {})


def transformers_form(checkpoint: Checkpoint) -> tuple[Saved, Mapping[str, str]]:
    """The model as its class of transformers has it, and the text of the files beside it, by path.

    Raises BadInput, naming the site, for what a configuration can't say.
    """
    origin = origin_of(checkpoint)
    files = {path: json.dumps(content, indent=2) for path, content in origin.files.items()}
    return origin.saved(checkpoint), {**files, **traced_model.extra_files(checkpoint.model)}


def write_transformers(form: Saved, files: Mapping[str, str], directory: Path) -> None:
    """Write model.safetensors, config.json and the files beside them, all or none, in place of an older model's."""
    names = (WEIGHTS, *files, CONFIG)
    with replacing_files(directory, names, removed=[name for name in BESIDE if name not in names]) as written:
        weights, *others, config = written
        save_file(form.state, weights, metadata={"format": "pt"})
        for path, text in zip(others, files.values(), strict=True):
            path.write_text(text, encoding="utf-8")
        write_json(config, form.config)
