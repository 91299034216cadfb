"""Encoders of BERT's kind as a family: where their sites are, how they are run, taken apart and built again.

Legend: B texts, N tokens, C channels.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from calib.inputs import Inputs, named
from ground.errors import BadInput
from ground.ports import OutputPort

from .architecture import MOST_PARAMETERS, Architecture
from .attention_site import site_of_attention
from .channel_site import ChannelSite
from .head_attention import HeadAttention
from .head_site import HeadSite
from .modules import parameters
from .sites import Sites
from .steps import Branch, Passage, Step
from .text_encoder import EncoderArchitecture, Mlp, TextEncoder
from .tokenizer import FILE as TOKENIZER
from .tokenizer import TextSpec, Tokenization, content_of_tokenizer

NAME = "bert"
UNMERGEABLE = "a text encoder's tokens are not merged, since its texts are of different lengths"
"""Texts differ in length: a schedule that suits one would merge away all of another."""
EMBEDDING = OutputPort(name="embedding", role="embedding")


class EncoderArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What config.json of a model directory says of an encoder."""

    encoder: EncoderArchitecture
    text: Tokenization


def arguments_of(architecture: Architecture) -> EncoderArguments:
    """Raises BadInput, naming the entry, for one that is missing, of another type or beyond bounds."""
    try:
        arguments = msgspec.convert(dict(architecture.kwargs), EncoderArguments)
    except ValueError as error:  # msgspec's own are ValueErrors too
        raise BadInput(f"architecture of a text encoder: {str(error)[:300]}; write the model again") from None
    if arguments.text.length > arguments.encoder.longest:
        raise BadInput(
            f"a text of {arguments.text.length} tokens: the encoder has places for {arguments.encoder.longest} at most"
        )
    return arguments


def architecture_of(name: str, arguments: EncoderArguments) -> Architecture:
    """As config.json has it; `name` is the kind that the weights were trained as."""
    return Architecture(name=name, kwargs=msgspec.to_builtins(arguments), family=NAME)


def accepts(model: nn.Module) -> bool:
    return isinstance(model, TextEncoder)


def _encoder(model: nn.Module) -> TextEncoder:
    assert isinstance(model, TextEncoder), type(model)
    return model


def build(architecture: Architecture) -> nn.Module:
    """The encoder with its initial weights, in eval mode; its tokenizer is set by `take_beside_`."""
    arguments = arguments_of(architecture)
    with torch.device("meta"):
        count = parameters(TextEncoder(arguments.encoder))
    if count > MOST_PARAMETERS:
        raise BadInput(f"an encoder of {count:,} parameters; {MOST_PARAMETERS:,} at most are built")
    return TextEncoder(arguments.encoder, arguments.text).eval()


def _channel_site(name: str, mlp: nn.Module) -> ChannelSite:
    assert isinstance(mlp, Mlp), (name, mlp)
    return ChannelSite(name=name, first=mlp.fc1, last=mlp.fc2, first_name=f"{name}.fc1", last_name=f"{name}.fc2")


def _head_site(name: str, attention: nn.Module) -> HeadSite:
    assert isinstance(attention, HeadAttention), (name, attention)
    return site_of_attention(name, attention)


def sites(model: nn.Module) -> Sites:
    """The MLPs, then the attentions, dense or already reduced."""
    blocks = [(f"blocks.{index}", block) for index, block in enumerate(_encoder(model).blocks)]
    channels = [_channel_site(f"{name}.mlp", block.get_submodule("mlp")) for name, block in blocks]
    heads = [_head_site(f"{name}.attn", block.get_submodule("attn")) for name, block in blocks]
    return Sites(every=(*channels, *heads), refused=())


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """Of every block the attention's branch, the norm behind it, the MLP's branch and the norm behind that."""
    blocks = _encoder(model).blocks
    for index, block in enumerate(blocks):
        counted = read if index == len(blocks) - 1 else None
        for layer, norm in (("attn", "norm1"), ("mlp", "norm2")):
            yield Branch(
                name=f"blocks.{index}.{layer}",
                norm=nn.Identity(),
                layer=block.get_submodule(layer),
                scale_C=None,
                read=counted,
                mixes_tokens=layer == "attn",
            )
            yield Passage(module=block.get_submodule(norm))


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """What enters the first block [B,N,C]."""
    x_BNC: Tensor = _encoder(model).embeddings(named(inputs)["input_ids"])
    return x_BNC


def token_weights(model: nn.Module, inputs: Inputs) -> Tensor:
    """1 for a token, 0 for padding: [B,N]."""
    return named(inputs)["attention_mask"].to(torch.float32)


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """One embedding a text [B,C]."""
    return _encoder(model).pooled(x_BNC, named(inputs)["attention_mask"])


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """The last stream as it is: its norm is part of the last block."""
    return x_BNC


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """The mark of a text's start, and everything behind it."""
    return ("first", *["text"] * (input_spec(model).shape[0] - 1))


def grid(model: nn.Module, layer: str) -> None:
    """Tokens make no map."""


def depth(model: nn.Module) -> int:
    return len(_encoder(model).blocks)


def input_spec(model: nn.Module) -> TextSpec:
    encoder = _encoder(model)
    assert encoder.tokenization is not None, "an encoder that is reduced knows its texts"
    return TextSpec(
        tokenization=encoder.tokenization,
        tokenizer_json=encoder.tokenizer_json,
        vocabulary=encoder.architecture.vocabulary,
    )


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    return (EMBEDDING,)


def classes(model: nn.Module) -> int:
    """None: what it says is an embedding."""
    return 0


def beside(model: nn.Module) -> Mapping[str, str]:
    """The content of what stands beside the weights in a model directory, by file name."""
    return {TOKENIZER: _encoder(model).tokenizer_json}


def take_beside_(model: nn.Module, directory: Path) -> None:
    """Give a model just built the tokenizer of its directory. Raises BadInput for another one or none."""
    encoder = _encoder(model)
    assert encoder.tokenization is not None, "a model of a directory was built with it"
    encoder.tokenizer_json = content_of_tokenizer(directory, sha256=encoder.tokenization.sha256)
