"""Encoders and decoders in directories of transformers and sentence-transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import asdict

from corp_deploy.families import decoder, decoder_config, hf_classes
from corp_deploy.families.decoder import DecoderArguments
from corp_deploy.families.decoder_names import state_from_transformers
from corp_deploy.families.hf_encoders import (
    OUTPUTS,
    PREFIX,
    Arguments,
    Pooling,
    architecture_of_encoder,
    most_tokens,
    state_of,
)
from corp_deploy.families.hf_images import Prepared, Sides, has_default, prepared
from corp_deploy.families.sentence_files import (
    LENGTH,
    Changes,
    PooledBy,
    pooled_by,
    read_files,
    sentence_files,
    text_length,
)
from corp_deploy.families.tokenizer import FILE as TOKENIZER
from corp_deploy.families.tokenizer import Tokenization, digest_of_tokenizer
from corp_deploy.families.traced_model import load_extra_files_
from corp_deploy.spec.architecture import Architecture, Preprocessing
from ground.errors import BadInput
from ground.records import record_from_file

from .checkpoint import Checkpoint, dense_from_architecture, load_weights
from .hub_snapshot import CONFIG, ORIGIN, config_of_transformers, read_changes, weights_of_transformers
from .weight_file import first_names
from .weights import read_weights, state_as_named

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
SENTENCE_KINDS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra")
"""The types of encoders that give one embedding a text by default: the mean of its tokens."""
_TAKES = (
    "an encoder of transformers takes img_size of images, and num_classes 0 for the tower without its head; pooling "
    "(mean, first), normalize and length of texts; or length of samples"
)


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The entries of --model-kwargs, which override those of the directory."""

    img_size: Sides | None = None
    num_classes: Literal[0] | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    length: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoder:
    """An encoder as its directory describes it: arguments, preprocessing and its source, files, and notes."""

    arguments: Arguments
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    notes: tuple[str, ...] = ()
    source: str = ""  # the file or default that says the preprocessing
    files: Mapping[str, Any] = field(default_factory=dict)
    whole: str | None = None  # the class that wrote the model, where the model is built without its head


def _without_head(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {**config, "architectures": [hf_classes.base_of(config, where=where).__name__]}


def _text_encoder(directory: Path, request: _Request, config: dict[str, Any], *, looked_at: bool) -> _Encoder:
    where, by = str(directory / CONFIG), pooled_by(directory)
    pools = by is not None or request.pooling is not None or request.normalize is not None
    base = _without_head(config, where)
    is_base = hf_classes.class_of(config, where=where).__name__ == base["architectures"][0]
    pools = pools or (is_base and config.get("model_type") in SENTENCE_KINDS)
    own, arguments = base if pools else config, dict[str, Any]()
    if pools or (directory / TOKENIZER).exists():
        longest = most_tokens(config, where=where)
        limits = text_length(directory, longest)
        if request.length is not None and request.length > longest:
            raise BadInput(f"a text of {request.length} tokens: the encoder has places for {longest} at most")
        arguments["text"] = Tokenization(
            length=request.length or limits.tokens,
            pad_id=config.get("pad_token_id") or 0,
            lower_case=limits.lower_case,
            sha256=digest_of_tokenizer(directory, needed=not looked_at),
        )
    else:
        arguments["length"] = request.length
    if pools:
        by = by or PooledBy(pooling="mean", normalize=False)
        normalize = by.normalize if request.normalize is None else request.normalize
        arguments |= {"pooling": request.pooling or by.pooling, "normalize": normalize}
    written = hf_classes.written_class(config)
    return _Encoder(
        arguments=Arguments(config=own, **arguments),
        files=sentence_files(directory),
        whole=written if written and written != base["architectures"][0] and (pools or is_base) else None,
    )


def _preparation(directory: Path, model_type: str) -> tuple[Prepared | None, str, Mapping[str, Any]]:
    """Return preprocessing or None, its source or why the file is unused, and the content of the file if it is used."""
    for name in (PREPROCESSOR, PROCESSOR):
        if not (directory / name).is_file():
            continue
        content = record_from_file(directory / name, dict[str, Any])
        content = content.get("image_processor", {}) if name == PROCESSOR else content
        if isinstance(content, Mapping) and content:
            try:
                return prepared(content, model_type, where=str(directory / name)), name, content
            except BadInput as error:
                if has_default(model_type):
                    raise
                return None, f"{name}: not used: {str(error).removeprefix(str(directory / name)).strip(': ')}", {}
    if not has_default(model_type):
        return None, "", {}
    source = f"transformers' default of {model_type}, as there is no {PREPROCESSOR}"
    return prepared({}, model_type, where=f"{directory}: no {PREPROCESSOR}"), source, {}


def _image_encoder(
    directory: Path, request: _Request, config: dict[str, Any], preprocessing: Preprocessing
) -> _Encoder:
    where = str(directory / CONFIG)
    config = _without_head(config, where) if request.num_classes == 0 else config
    preparation, source, content = _preparation(directory, str(config.get("model_type")))
    # The sides that are requested; those of the preprocessing where the class takes any size; else the positions'.
    takes_any = str(config.get("model_type")).startswith(("dinov2", "dinov3")) or "image_size" not in config
    own = list(preparation.sides) if preparation and content and takes_any else None
    sides = request.img_size if request.img_size is not None else own
    name = hf_classes.class_of(config, where=where).__name__
    arguments = Arguments(
        config=config, img_size=tuple(sides) if isinstance(sides, list) else sides, output=OUTPUTS.get(name)
    )
    channels = config.get("num_channels", 3)
    settings = preprocessing.for_channels(channels).settings
    settings = {**(preparation.preprocessing.settings if preparation else {}), **settings}
    notes = [f"{CONFIG}: its output is {arguments.output} of {name}"] if arguments.output else []
    if preparation is None and source:
        notes.append(source)
    if preparation and content and request.img_size is not None:
        height, width = preparation.sides
        notes.append(f"{source}: makes images of {height}x{width}, which are made of another size here")
    return _Encoder(
        arguments=arguments,
        preprocessing=Preprocessing(**settings),
        notes=tuple(notes),
        source=source if preparation else "what is given beside the directory",
        files={PREPROCESSOR: dict(content)} if content and request.img_size is None else {},
    )


def _read_encoder(
    directory: Path, kwargs: Mapping[str, Any], preprocessing: Preprocessing, *, looked_at: bool = False
) -> _Encoder:
    request = read_changes(kwargs, _Request, _TAKES)
    where = str(directory / CONFIG)
    config = hf_classes.tower_in(config_of_transformers(directory), where=where)
    main = hf_classes.class_of(config, where=where).main_input_name
    given = {name for name, value in asdict(request).items() if value is not None}
    accepted = {
        hf_classes.TEXT: {"pooling", "normalize", "length"},
        hf_classes.IMAGES: {"img_size", "num_classes"},
    }.get(main, {"length"})
    if odd := sorted(given - accepted):
        raise BadInput(f"--model-kwargs: {odd[0]}: not taken by a model of {main}; {_TAKES}")
    if main != hf_classes.IMAGES and preprocessing.settings:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in preprocessing.settings)
        raise BadInput(f"--model {directory} takes no images; drop {options}")
    if main == hf_classes.TEXT:
        return _text_encoder(directory, request, config, looked_at=looked_at)
    if main == hf_classes.IMAGES:
        return _image_encoder(directory, request, config, preprocessing)
    return _Encoder(arguments=Arguments(config=config, length=request.length))


def encoder_architecture(directory: Path, kwargs: Mapping[str, Any], preprocessing: Preprocessing) -> Architecture:
    """Return the architecture of a directory with or without weights. Raises BadInput as load_transformers does."""
    encoder = _read_encoder(directory, kwargs, preprocessing, looked_at=True)
    return architecture_of_encoder(encoder.arguments, encoder.preprocessing, where=CONFIG)


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def load_transformers(
    directory: Path, kwargs: Mapping[str, Any] = _NOTHING, preprocessing: Preprocessing | None = None
) -> Checkpoint:
    """Return the checkpoint of a directory's encoder in transformers' own class, with its tokenizer if there is one.

    No code of the directory is run, and no network is used. `kwargs` override the directory's entries: img_size, and
    num_classes 0 for a tower without its head; pooling, normalize and length of texts; or length of samples. Raises
    BadInput for a model that can't be built, read or traced, and for missing or pickled weights; Missing without
    transformers.
    """
    encoder = _read_encoder(directory, kwargs, preprocessing or Preprocessing())
    file = weights_of_transformers(directory)
    arguments, state, unused = state_of(directory, encoder.arguments)
    architecture = architecture_of_encoder(arguments, encoder.preprocessing, where=str(directory / CONFIG))
    model = dense_from_architecture(architecture)
    load_weights(model, state, where=file)
    load_extra_files_(model, directory)
    name = architecture.name.removeprefix(PREFIX)
    notes = [f"{CONFIG}: read as {name} of transformers, traced", *encoder.notes]
    notes += [f"{file.name}: not used, no part of it: {first_names(list(unused))}"] if unused else []
    origin = {"files": dict(encoder.files)} | ({} if encoder.whole is None else {"whole": encoder.whole})
    source = {
        "weights": file.name,
        "notes": notes,
        "preprocessing": encoder.source,
        "class": name,
        **({} if arguments.output is None else {"output": arguments.output}),
        **({} if arguments.text is None else {"tokenizer_sha256": arguments.text.sha256}),
        ORIGIN: origin,
    }
    beside = read_weights(file).state if encoder.whole else {}
    unread = {**model.state_dict(), **{name: beside[name] for name in unused if name in beside}}
    lineage = {"source": source}
    return Checkpoint(model=model, architecture=architecture, lineage=lineage, notes=tuple(notes), unread=unread)


def decoder_arguments(
    directory: Path, kwargs: Mapping[str, Any], *, looked_at: bool = False
) -> tuple[str, DecoderArguments]:
    """Return a decoder's type and arguments, if only `looked_at` without a tokenizer. Raises as load_decoder."""
    config = config_of_transformers(directory)
    architecture = decoder_config.architecture_from_transformers(config, where=str(directory / CONFIG))
    changes = read_changes(kwargs, Changes, "a decoder takes length, the tokens of a sequence")
    text = Tokenization(
        length=changes.length or min(LENGTH, architecture.longest),
        sha256=digest_of_tokenizer(directory, needed=not looked_at),
    )
    return config["model_type"], DecoderArguments(decoder=architecture, text=text)


def lineage_of_decoder(directory: Path, arguments: DecoderArguments, weights: Path) -> dict[str, Any]:
    """Return the lineage of a decoder: weights, tokenizer's digest, and its files to write again for transformers."""
    return {
        "source": {
            "weights": weights.name,
            "tokenizer_sha256": arguments.text.sha256,
            ORIGIN: {"config": config_of_transformers(directory), "files": read_files(directory)},
        }
    }


def load_decoder(directory: Path, kwargs: Mapping[str, Any] = _NOTHING) -> Checkpoint:
    """Return the checkpoint of a directory's decoder with its tokenizer. No code of it is run, no network is used.

    `kwargs` may have `length`, the tokens of a sequence. Raises BadInput for a model that is not built here, weights
    that are missing, pickled or another model's, and a directory without a tokenizer.json.
    """
    kind, arguments = decoder_arguments(directory, kwargs)
    architecture = decoder.architecture_of_decoder(kind, arguments)
    file = weights_of_transformers(directory)
    state = state_from_transformers(state_as_named(file), kind, where=str(file), decoder=arguments.decoder)
    model = dense_from_architecture(architecture)
    load_weights(model, state, where=file)
    load_extra_files_(model, directory)
    return Checkpoint(model=model, architecture=architecture, lineage=lineage_of_decoder(directory, arguments, file))
