"""A text encoder or a decoder as transformers and sentence-transformers leave it in a directory. Reads files alone."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace
from torch import nn

from corp_deploy.families import bert, decoder
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.bert import EncoderArguments
from corp_deploy.families.decoder import DecoderArguments
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

from .checkpoint import Checkpoint, dense_from_architecture, load_weights
from .hub_snapshot import CONFIG, ORIGIN, changes_of, config_of_transformers, weights_of_transformers
from .weights import State, first_names, read_weights, state_as_named

TAKES = "a text encoder takes pooling (mean, first), normalize and length"


class _Changes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What --model-kwargs may say otherwise than the directory."""

    pooling: Pooling | None = None
    normalize: bool | None = None
    length: Annotated[int, msgspec.Meta(ge=1)] | None = None


def encoder_arguments(
    directory: Path, kwargs: Mapping[str, Any], *, looked_at: bool = False
) -> tuple[str, EncoderArguments]:
    """The kind of encoder and what builds it; one `looked_at` may lack its tokenizer. Raises as `load_transformers`."""
    changes = changes_of(kwargs, _Changes, TAKES)
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
