"""Encoders of BERT's kind as config.json of a model directory tells them, built to be traced, and as a config.json of
transformers describes them, typed and bounded where it is read.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from torch import nn

from corp_deploy.traced.models.module import Facts, refuse_larger, traced_module
from ground.errors import BadInput
from ground.ports import OutputPort
from ground.records import record_from_value

from .architecture import Architecture
from .text_encoder import ACTIVATIONS, EncoderArchitecture, Eps, Heads, Layers, Rows, TextEncoder, TokenTypes, Width
from .tokenizer import TextSpec, Tokenization

NAME = "bert"
EMBEDDING = OutputPort(name="embedding", role="embedding")


class EncoderArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What config.json of a model directory says of an encoder."""

    encoder: EncoderArchitecture
    text: Tokenization


def arguments_of(architecture: Architecture) -> EncoderArguments:
    """Raises BadInput, naming the entry, for one that is missing, of another type or beyond bounds."""
    where, remedy = "architecture of a text encoder", "write the model again"
    arguments = record_from_value(dict(architecture.kwargs), EncoderArguments, where=where, remedy=remedy)
    if arguments.text.length > arguments.encoder.longest:
        raise BadInput(
            f"a text of {arguments.text.length} tokens: the encoder has places for {arguments.encoder.longest} at most"
        )
    return arguments


def architecture_of(name: str, arguments: EncoderArguments) -> Architecture:
    """As config.json has it; `name` is the kind that the weights were trained as."""
    return Architecture(name=name, kwargs=msgspec.to_builtins(arguments), family=NAME)


def build(architecture: Architecture) -> nn.Module:
    """The encoder with its initial weights, in eval mode; its tokenizer is set by `load_extra_files_`."""
    arguments = arguments_of(architecture)
    refuse_larger(lambda: TextEncoder(arguments.encoder), "an encoder")
    spec = TextSpec(tokenization=arguments.text, tokenizer_json="", vocabulary=arguments.encoder.vocabulary)
    return traced_module(TextEncoder(arguments.encoder), Facts(spec=spec, outputs=(EMBEDDING,), classes=0))


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a config.json of transformers, by BERT's names."""

    model_type: str
    vocab_size: Rows
    hidden_size: Width
    num_attention_heads: Heads
    intermediate_size: Width
    num_hidden_layers: Layers
    max_position_embeddings: Rows
    type_vocab_size: TokenTypes = 2
    hidden_act: str = "gelu"
    layer_norm_eps: Eps = 1e-12
    pad_token_id: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    position_embedding_type: str = "absolute"
    embedding_size: int | None = None
    is_decoder: bool = False
    add_cross_attention: bool = False
    auto_map: Any = None
    quantization_config: Any = None
    pruned_heads: Any = None


# What DistilBERT calls the same things; its layer norms' eps and the missing token types stand in its code.
_OF_DISTILBERT = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "activation": "hidden_act",
}
MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra")
_OFFSET = ("roberta", "xlm-roberta", "camembert")


def _refusal(config: _Config) -> str:
    """Why this model can't be built here, or nothing."""
    kind = config.position_embedding_type
    reasons = {
        f"its position embeddings are {kind!r:.60}, absolute ones alone are built": kind != "absolute",
        "it comes with code of its own (auto_map), which is never run": bool(config.auto_map),
        "it is a decoder": config.is_decoder or config.add_cross_attention,
        "it is quantised; give the weights before that": config.quantization_config is not None,
        "some of its heads are removed already": bool(config.pruned_heads),
        f"its embeddings are {config.embedding_size} wide and its blocks {config.hidden_size}, with a projection "
        "between": config.embedding_size not in (None, config.hidden_size),
        f"its activation is {config.hidden_act!r:.60}, expected {', '.join(ACTIVATIONS)}": (
            config.hidden_act not in ACTIVATIONS
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def architecture_from_transformers(config: Mapping[str, Any], *, where: str) -> EncoderArchitecture:
    """The encoder that a config.json of transformers describes, pooled by the mean and not normalised.

    Raises BadInput for another kind of model, and for what no such encoder here can do.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise BadInput(f"{where}: model_type is {kind!r:.60}, expected one of {', '.join(MODEL_TYPES)}")
    distilled = {"type_vocab_size": 0, "layer_norm_eps": 1e-12} if kind == "distilbert" else {}
    theirs = _OF_DISTILBERT if kind == "distilbert" else {}
    try:
        read = msgspec.convert({**{theirs.get(key, key): value for key, value in config.items()}, **distilled}, _Config)
        if reason := _refusal(read):
            raise BadInput(f"{where}: this {kind} can't be built: {reason}")
        return EncoderArchitecture(
            vocabulary=read.vocab_size,
            positions=read.max_position_embeddings,
            first_position=(1 if read.pad_token_id is None else read.pad_token_id) + 1 if kind in _OFFSET else 0,
            token_types=read.type_vocab_size,
            width=read.hidden_size,
            heads=read.num_attention_heads,
            hidden=read.intermediate_size,
            layers=read.num_hidden_layers,
            activation=read.hidden_act,
            eps=read.layer_norm_eps,
        )
    except BadInput:
        raise
    except ValueError as error:  # msgspec's own are ValueErrors too
        words = str(error)[:300]
        for own, common in theirs.items():
            words = words.replace(f"$.{common}", f"$.{own}")
        raise BadInput(f"{where}: not the configuration of a {kind} encoder: {words}") from None
