"""A decoder as transformers leaves it in a directory. Reads files alone."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from corp_deploy.families import decoder
from corp_deploy.families.decoder import DecoderArguments
from corp_deploy.families.decoder_config import architecture_from_transformers
from corp_deploy.families.decoder_files import LENGTH, Changes, decoder_files
from corp_deploy.families.text_names import state_from_transformers
from corp_deploy.families.tokenizer import Tokenization, digest_of_tokenizer
from corp_deploy.families.traced_model import load_extra_files_

from .checkpoint import Checkpoint, dense_from_architecture, load_weights
from .hub_snapshot import CONFIG
from .transformers_files import ORIGIN, changes_of, config_of_transformers, weights_of_transformers
from .weight_fit import require_fit
from .weights import Weights, state_as_named


def decoder_arguments(
    directory: Path, kwargs: Mapping[str, Any], *, looked_at: bool = False
) -> tuple[str, DecoderArguments]:
    """The kind of decoder, what builds it, and what it makes of texts, whose tokenizer one that is `looked_at` alone
    may be without. Raises BadInput as `load_decoder`.
    """
    config = config_of_transformers(directory)
    architecture = architecture_from_transformers(config, where=str(directory / CONFIG))
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
    model = dense_from_architecture(architecture)
    require_fit(model, Weights(path=file, state=state))
    load_weights(model, state, where=file)
    load_extra_files_(model, directory)
    return Checkpoint(model=model, architecture=architecture, lineage=lineage_of_decoder(directory, arguments, file))
