"""Encoders of BERT's kind as config.json of a model directory tells them, built to be traced."""

import msgspec
from torch import nn

from corp_deploy.traced.models.module import Facts, refuse_larger, traced_module
from ground.errors import BadInput
from ground.ports import OutputPort
from ground.records import record_from_value

from .architecture import Architecture
from .text_encoder import EncoderArchitecture, TextEncoder
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
