"""The builder of traced causal language models from the config.json of a model directory."""

import msgspec
from torch import Tensor, nn

from corp_deploy.spec.architecture import Architecture
from corp_deploy.traced.models.array_inputs import ArraySpec
from corp_deploy.traced.models.module import Facts, TracedModule, refuse_larger, traced_module
from ground.errors import BadInput
from ground.ports import OutputPort, Port
from ground.records import record_from_value

from .decoder_model import DecoderArchitecture, DecoderBlock, TextDecoder
from .tokenizer import SequenceSpec, Tokenization

NAME = "decoder"
_MULTIPLE = 128
"""The number that MLP widths are a multiple of, as serving engines' kernels and their shards over GPUs need it."""


class DecoderArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The entries of a model directory's config.json that describe a decoder."""

    decoder: DecoderArchitecture
    text: Tokenization


def architecture_of_decoder(name: str, arguments: DecoderArguments) -> Architecture:
    """Return the architecture that config.json keeps; `name` is the model type that the weights were trained as."""
    return Architecture(name=name, kwargs=msgspec.to_builtins(arguments), family=NAME)


def build_decoder(architecture: Architecture) -> nn.Module:
    """Return the traced decoder with its initial weights, in eval mode, without a tokenizer.

    `load_extra_files_` sets the tokenizer. Raises BadInput, naming the entry, for an entry that is missing, of another
    type or out of bounds.
    """
    where, remedy = "architecture of a decoder", "write the model again"
    arguments = record_from_value(dict(architecture.kwargs), DecoderArguments, where=where, remedy=remedy)
    length, longest = arguments.text.length, arguments.decoder.longest
    if length > longest:
        raise BadInput(f"sequences of {length} tokens: a token of this decoder sees {longest} at most")
    refuse_larger(lambda: TextDecoder(arguments.decoder), "a decoder")
    return traced_decoder(TextDecoder(arguments.decoder), arguments.text)


def traced_decoder(decoder: TextDecoder, text: Tokenization) -> TracedModule:
    """Return the decoder as a traced model without a tokenizer, which `load_extra_files_` sets.

    Its layers without a bias stay without one, since engines can't add a bias to them.
    """
    spec = SequenceSpec(tokenization=text, tokenizer_json="", vocabulary=decoder.architecture.vocabulary)
    logits = OutputPort(name="logits", role="token logits")
    return traced_module(decoder, Facts(spec=spec, outputs=(logits,), classes=0, biasless=True, multiple=_MULTIPLE))


class _Block(nn.Module):
    """A block under the name that it has in the whole model."""

    def __init__(self, index: int, block: DecoderBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): block})
        self.at = str(index)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.blocks[self.at](x_BNC)


def traced_block(index: int, block: DecoderBlock, arguments: DecoderArguments) -> TracedModule:
    """Return one block as a traced model, with the same sites that it has in the whole model."""
    stream = Port(name="entering", shape=(arguments.text.length, arguments.decoder.width))
    leaving = OutputPort(name="leaving", role="feature map")
    facts = Facts(spec=ArraySpec(ports=(stream,)), outputs=(leaving,), classes=0, biasless=True, multiple=_MULTIPLE)
    return traced_module(_Block(index, block), facts)
