"""A text encoder, a decoder or a vision transformer, which is read as timm's model of the same architecture, as
transformers and sentence-transformers leave it in a directory. Reads files alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace
from torch import nn

from corp_deploy.families import bert, decoder, hf_names
from corp_deploy.families.bert import EncoderArguments
from corp_deploy.families.decoder import DecoderArguments
from corp_deploy.families.hf_config import Sides, VisionModel, both, vision_model
from corp_deploy.families.hf_preprocessing import Prepared, prepared, timm_arguments, timm_name
from corp_deploy.families.hf_saved import own_config, written_again
from corp_deploy.families.sentence_files import (
    LENGTH,
    Changes,
    PooledBy,
    decoder_files,
    pooled_by,
    sentence_files,
    text_length,
)
from corp_deploy.families.text_encoder import Pooling
from corp_deploy.families.text_names import prefix_in, state_from_transformers
from corp_deploy.families.tokenizer import Tokenization, digest_of_tokenizer
from corp_deploy.families.traced_model import load_extra_files_
from corp_deploy.spec.architecture import Architecture, Preprocessing
from ground.records import record_from_file

from .checkpoint import Checkpoint, dense_from_architecture, load_weights
from .hub_snapshot import CONFIG, ORIGIN, changes_of, config_of_transformers, weights_of_transformers
from .weight_file import State, first_names
from .weights import read_weights, state_as_named


class _EncoderChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What --model-kwargs may say otherwise than the directory."""

    pooling: Pooling | None = None
    normalize: bool | None = None
    length: Annotated[int, msgspec.Meta(ge=1)] | None = None


def encoder_arguments(
    directory: Path, kwargs: Mapping[str, Any], *, looked_at: bool = False
) -> tuple[str, EncoderArguments]:
    """The kind of encoder and what builds it; one `looked_at` may lack its tokenizer. Raises as `load_transformers`."""
    changes = changes_of(kwargs, _EncoderChanges, "a text encoder takes pooling (mean, first), normalize and length")
    config = config_of_transformers(directory)
    encoder = bert.architecture_from_transformers(config, where=str(directory / CONFIG))
    by = pooled_by(directory) or PooledBy(pooling=encoder.pooling, normalize=encoder.normalize)
    normalize = by.normalize if changes.normalize is None else changes.normalize
    encoder = replace(encoder, pooling=changes.pooling or by.pooling, normalize=normalize)
    length = text_length(directory, encoder.longest)
    tokenization = Tokenization(
        length=changes.length or length.tokens,
        pad_id=config.get("pad_token_id") or 0,
        lower_case=length.lower_case,
        sha256=digest_of_tokenizer(directory, needed=not looked_at),
    )
    return config["model_type"], EncoderArguments(encoder=encoder, text=tokenization)


def load_transformers(directory: Path, kwargs: Mapping[str, Any] = MappingProxyType({})) -> Checkpoint:
    """The encoder in a directory with its tokenizer. Nothing is executed, nothing looked for on a network.

    `kwargs` go before what the directory says: pooling, normalize, and length, the tokens that a text is cut or padded
    to.

    Raises BadInput for a model that is not built here, for weights that are missing, pickled or another model's, and
    for a directory without a tokenizer.json.
    """
    kind, arguments = encoder_arguments(directory, kwargs)
    file = weights_of_transformers(directory)
    read = read_weights(file)
    state, beside = state_from_transformers(read.state, kind, where=str(file))
    architecture = bert.architecture_of(kind, arguments)
    model = _model(architecture, state, file)
    unused = [f"{file.name}: not used, no part of the encoder: {first_names(list(beside))}"] if beside else []
    notes = (*read.notes, *unused)
    source = {
        "weights": file.name,
        "notes": list(notes),
        "tokenizer_sha256": arguments.text.sha256,
        ORIGIN: {
            "config": config_of_transformers(directory),
            "prefix": prefix_in(read.state, kind),
            "beside": list(beside),
            "files": sentence_files(directory),
        },
    }
    unread = {name: read.state[name] for name in beside}
    return Checkpoint(model=model, architecture=architecture, lineage={"source": source}, notes=notes, unread=unread)


def _model(architecture: Architecture, state: State, file: Path) -> nn.Module:
    """With these weights of the file and the tokenizer beside it."""
    model = dense_from_architecture(architecture)
    load_weights(model, state, where=file)
    load_extra_files_(model, file.parent)
    return model


def decoder_arguments(
    directory: Path, kwargs: Mapping[str, Any], *, looked_at: bool = False
) -> tuple[str, DecoderArguments]:
    """The kind of decoder and what builds it; one `looked_at` may lack its tokenizer. Raises as `load_decoder`."""
    config = config_of_transformers(directory)
    architecture = decoder.architecture_from_transformers(config, where=str(directory / CONFIG))
    changes = changes_of(kwargs, Changes, "a decoder takes length, the tokens of a sequence")
    text = Tokenization(
        length=changes.length or min(LENGTH, architecture.longest),
        sha256=digest_of_tokenizer(directory, needed=not looked_at),
    )
    return config["model_type"], DecoderArguments(decoder=architecture, text=text)


def lineage_of_decoder(directory: Path, arguments: DecoderArguments, weights: Path) -> dict[str, Any]:
    """Where a model comes from, and what it takes to write it as its class of transformers again."""
    return {
        "source": {
            "weights": weights.name,
            "tokenizer_sha256": arguments.text.sha256,
            ORIGIN: {"config": config_of_transformers(directory), "files": decoder_files(directory)},
        }
    }


def load_decoder(directory: Path, kwargs: Mapping[str, Any] = MappingProxyType({})) -> Checkpoint:
    """The decoder in a directory with its tokenizer. Nothing is executed, nothing looked for on a network.

    `kwargs`: length, the tokens of a sequence. Raises BadInput for a model that is not built here, for weights that are
    missing, pickled or another model's, and for a directory without a tokenizer.json.
    """
    kind, arguments = decoder_arguments(directory, kwargs)
    architecture = decoder.architecture_of(kind, arguments)
    file = weights_of_transformers(directory)
    state, _ = state_from_transformers(state_as_named(file), kind, where=str(file), decoder=arguments.decoder)
    lineage = lineage_of_decoder(directory, arguments, file)
    return Checkpoint(model=_model(architecture, state, file), architecture=architecture, lineage=lineage)


PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"


class _VisionChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What --model-kwargs may say otherwise than the directory."""

    img_size: Sides | None = None
    num_classes: Literal[0] | None = None


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


def _read(directory: Path, kwargs: Mapping[str, Any], preprocessing: Preprocessing) -> _Read:
    takes = "a vision model of transformers takes img_size, and num_classes 0 for the tower without its head"
    changes, config = changes_of(kwargs, _VisionChanges, takes), config_of_transformers(directory)
    model = vision_model(config, where=str(directory / CONFIG), without_head=changes.num_classes == 0)
    preparation, source, content = _preparation(directory, model)
    # As asked for; as they are prepared where the model's class takes any size; else those of its positions.
    takes_any = model.config.model_type.startswith(("dinov2", "dinov3")) and bool(content)
    own = preparation.sides if takes_any else model.config.sides
    sides = own if changes.img_size is None else both(changes.img_size)
    settings = preprocessing.for_channels(model.config.num_channels).settings
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


def vision_architecture(directory: Path, kwargs: Mapping[str, Any], preprocessing: Preprocessing) -> Architecture:
    """Of a directory with or without weights. Raises BadInput as load_vision does."""
    return _read(directory, kwargs, preprocessing).architecture


def load_vision(directory: Path, kwargs: Mapping[str, Any], preprocessing: Preprocessing) -> Checkpoint:
    """The vision tower in a directory. Nothing is executed, nothing looked for on a network.

    `kwargs`: img_size, and num_classes 0 for a tower without its head; `preprocessing` goes before the directory's.

    Raises BadInput for a model that timm's VisionTransformer can't be, and for weights that are missing, pickled or
    another model's.
    """
    own = _read(directory, kwargs, preprocessing)
    model, file = own.model, weights_of_transformers(directory)
    read = read_weights(file)
    mapped = hf_names.state_from_transformers(read.state, model, where=str(file))
    state = hf_names.with_positions_of(mapped.state, model, own.sides)
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
    return Checkpoint(
        model=built,
        architecture=own.architecture,
        lineage={"source": source},
        notes=notes,
        unread=written_again(mapped.beside),
    )
