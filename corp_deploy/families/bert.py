"""Encoders of BERT's kind as config.json of a model directory tells them, built to be traced, and as a config.json of
transformers describes them, typed and bounded where it is read.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from torch import nn

from corp_deploy.spec.architecture import Architecture
from corp_deploy.traced.models.module import Facts, refuse_larger, traced_module
from ground.errors import BadInput
from ground.ports import OutputPort
from ground.records import record_from_value

from .text_config import TextConfig, architecture_from
from .text_encoder import EncoderArchitecture, Eps, TextEncoder, TokenTypes
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


class _Config(TextConfig, frozen=True, kw_only=True):
    hidden_act: str = "gelu"
    layer_norm_eps: Eps = 1e-12
    type_vocab_size: TokenTypes = 2
    pad_token_id: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    position_embedding_type: str = "absolute"
    embedding_size: int | None = None
    is_decoder: bool = False
    add_cross_attention: bool = False

    def reasons(self) -> dict[str, bool]:
        kind = self.position_embedding_type
        return TextConfig.reasons(self) | {
            f"its position embeddings are {kind!r:.60}, absolute ones alone are built": kind != "absolute",
            "it is a decoder": self.is_decoder or self.add_cross_attention,
            f"its embeddings are {self.embedding_size} wide and its blocks {self.hidden_size}, with a projection "
            "between": self.embedding_size not in (None, self.hidden_size),
        }

    def architecture(self) -> EncoderArchitecture:
        """Pooled by the mean and not normalised."""
        first = 0
        if self.model_type in _OFFSET:
            first = (1 if self.pad_token_id is None else self.pad_token_id) + 1
        return EncoderArchitecture(**self.sizes, first_position=first, token_types=self.type_vocab_size)


class _DistilBert(_Config, frozen=True, kw_only=True):
    common: ClassVar[Mapping[str, str]] = {
        "dim": "hidden_size",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "activation": "hidden_act",
    }
    fixed: ClassVar[Mapping[str, Any]] = {"type_vocab_size": 0, "layer_norm_eps": 1e-12}


_OFFSET = ("roberta", "xlm-roberta", "camembert")
_KINDS: Mapping[str, type[_Config]] = {
    **dict.fromkeys(("bert", *_OFFSET), _Config),
    "distilbert": _DistilBert,
    "electra": _Config,
}
MODEL_TYPES = tuple(_KINDS)


def architecture_from_transformers(config: Mapping[str, Any], *, where: str) -> EncoderArchitecture:
    """Raises BadInput for another kind of model, and for what no such encoder here can do."""
    architecture = architecture_from(config, _KINDS, where=where, noun="encoder")
    assert isinstance(architecture, EncoderArchitecture), architecture
    return architecture
