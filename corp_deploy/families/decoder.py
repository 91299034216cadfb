"""Causal language models as config.json of a model directory tells them, built to be traced."""

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
LOGITS = OutputPort(name="logits", role="token logits")
MULTIPLE = 128
"""Of MLP widths: serving engines' kernels and their shards over several GPUs want it."""


class DecoderArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What config.json of a model directory says of a decoder."""

    decoder: DecoderArchitecture
    text: Tokenization


def arguments_of(architecture: Architecture) -> DecoderArguments:
    """Raises BadInput, naming the entry, for one that is missing, of another type or beyond bounds."""
    where, remedy = "architecture of a decoder", "write the model again"
    arguments = record_from_value(dict(architecture.kwargs), DecoderArguments, where=where, remedy=remedy)
    if arguments.text.length > arguments.decoder.longest:
        raise BadInput(
            f"sequences of {arguments.text.length} tokens: a token of this decoder sees {arguments.decoder.longest} at "
            "most"
        )
    return arguments


def architecture_of(name: str, arguments: DecoderArguments) -> Architecture:
    """As config.json has it; `name` is the kind that the weights were trained as."""
    return Architecture(name=name, kwargs=msgspec.to_builtins(arguments), family=NAME)


def build(architecture: Architecture) -> nn.Module:
    """The decoder with its initial weights, in eval mode; its tokenizer is set by `load_extra_files_`."""
    arguments = arguments_of(architecture)
    refuse_larger(lambda: TextDecoder(arguments.decoder), "a decoder")
    return traced_decoder(TextDecoder(arguments.decoder), arguments.text)


def traced_decoder(decoder: TextDecoder, text: Tokenization) -> TracedModule:
    """To be reduced; its tokenizer is set by `load_extra_files_`. Engines give no layer a bias that it has not."""
    spec = SequenceSpec(tokenization=text, tokenizer_json="", vocabulary=decoder.architecture.vocabulary)
    return traced_module(decoder, Facts(spec=spec, outputs=(LOGITS,), classes=0, biasless=True, multiple=MULTIPLE))


class _Block(nn.Module):
    """One block by its name in the whole model."""

    def __init__(self, index: int, block: DecoderBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): block})
        self.at = str(index)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.blocks[self.at](x_BNC)


def traced_block(index: int, block: DecoderBlock, arguments: DecoderArguments) -> TracedModule:
    """A block by itself, whose sites are those that it has in the whole model."""
    stream = Port(name="entering", shape=(arguments.text.length, arguments.decoder.width))
    leaving = OutputPort(name="leaving", role="feature map")
    facts = Facts(spec=ArraySpec(ports=(stream,)), outputs=(leaving,), classes=0, biasless=True, multiple=MULTIPLE)
    return traced_module(_Block(index, block), facts)
