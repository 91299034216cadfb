"""Causal language models as a family: where their sites are, how they are run, taken apart and built again.

Legend: B sequences, N tokens, C channels, V words.
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
from .modules import parameters, replaced
from .sequence_rotary import SequenceRotary
from .sites import Sites
from .steps import Branch, Step
from .text_decoder import DecoderArchitecture, GatedMlp, PlainMlp, TextDecoder
from .tokenizer import FILE as TOKENIZER
from .tokenizer import SequenceSpec, Tokenization, content_of_tokenizer
from .widths import HeadGeometry

NAME = "decoder"
UNMERGEABLE = "a decoder's tokens are not merged, since each has logits of its own"
"""Each token says what comes next."""
LOGITS = OutputPort(name="logits", role="token logits")
MULTIPLE = 128
"""Of MLP widths: serving engines' kernels and their shards over several GPUs want it."""


class DecoderArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What config.json of a model directory says of a decoder."""

    decoder: DecoderArchitecture
    text: Tokenization


def arguments_of(architecture: Architecture) -> DecoderArguments:
    """Raises BadInput, naming the entry, for one that is missing, of another type or beyond bounds."""
    try:
        arguments = msgspec.convert(dict(architecture.kwargs), DecoderArguments)
    except ValueError as error:  # msgspec's own are ValueErrors too
        raise BadInput(f"architecture of a decoder: {str(error)[:300]}; write the model again") from None
    if arguments.text.length > arguments.decoder.longest:
        raise BadInput(
            f"sequences of {arguments.text.length} tokens: a token of this decoder sees {arguments.decoder.longest} at "
            "most"
        )
    return arguments


def architecture_of(name: str, arguments: DecoderArguments) -> Architecture:
    """As config.json has it; `name` is the kind that the weights were trained as."""
    return Architecture(name=name, kwargs=msgspec.to_builtins(arguments), family=NAME)


def accepts(model: nn.Module) -> bool:
    return isinstance(model, TextDecoder)


def _decoder(model: nn.Module) -> TextDecoder:
    assert isinstance(model, TextDecoder), type(model)
    return model


def build(architecture: Architecture) -> nn.Module:
    """The decoder with its initial weights, in eval mode; its tokenizer is set by `take_beside_`."""
    arguments = arguments_of(architecture)
    with torch.device("meta"):
        count = parameters(TextDecoder(arguments.decoder))
    if count > MOST_PARAMETERS:
        raise BadInput(f"a decoder of {count:,} parameters; {MOST_PARAMETERS:,} at most are built")
    return TextDecoder(arguments.decoder, arguments.text).eval()


def _channel_site(name: str, mlp: nn.Module) -> ChannelSite:
    if isinstance(mlp, GatedMlp):
        return ChannelSite(
            name=name,
            first=mlp.gate,
            last=mlp.down,
            first_name=f"{name}.gate",
            last_name=f"{name}.down",
            up=mlp.up,
            up_name=f"{name}.up",
            biasless=mlp.down.bias is None,
            multiple=MULTIPLE,
        )
    assert isinstance(mlp, PlainMlp), (name, mlp)
    return ChannelSite(
        name=name,
        first=mlp.fc1,
        last=mlp.fc2,
        first_name=f"{name}.fc1",
        last_name=f"{name}.fc2",
        biasless=mlp.fc2.bias is None,
        multiple=MULTIPLE,
    )


def _head_site(name: str, attention: nn.Module, architecture: DecoderArchitecture) -> HeadSite:
    assert isinstance(attention, HeadAttention), (name, attention)
    shares = "groups of heads share keys and values" if attention.groups < attention.heads else ""
    normed = "a norm of each query and key stands behind their projections" if architecture.qk_norm else ""
    return site_of_attention(
        name,
        attention,
        mixing="none" if normed or (shares and not architecture.rope) else "planes" if architecture.rope else "free",
        reason="; ".join(filter(None, (normed, shares))),
        biasless=attention.proj.bias is None,
    )


def sites(model: nn.Module) -> Sites:
    """The MLPs, then the attentions, dense or already reduced."""
    decoder = _decoder(model)
    blocks = [sites_of_block(index, block, decoder.architecture) for index, block in enumerate(decoder.blocks)]
    return Sites(every=(*(mlp for mlp, _ in blocks), *(attention for _, attention in blocks)), refused=())


def sites_of_block(index: int, block: nn.Module, architecture: DecoderArchitecture) -> tuple[ChannelSite, HeadSite]:
    """Of one block, by their names in the whole model."""
    at = f"blocks.{index}"
    attention = _head_site(f"{at}.attn", block.get_submodule("attn"), architecture)
    return _channel_site(f"{at}.mlp", block.get_submodule("mlp")), attention


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """Of every block the attention's branch, then the MLP's."""
    blocks = _decoder(model).blocks
    for index, block in enumerate(blocks):
        counted = read if index == len(blocks) - 1 else None
        for layer, norm in (("attn", "norm1"), ("mlp", "norm2")):
            yield Branch(
                name=f"blocks.{index}.{layer}",
                norm=block.get_submodule(norm),
                layer=block.get_submodule(layer),
                scale_C=None,
                read=counted,
            )


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """What enters the first block [B,N,C]."""
    (input_ids,) = named(inputs).values()
    x_BNC: Tensor = _decoder(model).embeddings(input_ids)
    return x_BNC


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The logits of what comes next at each place [B,N,V]."""
    return _decoder(model).logits(x_BNC)


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """Behind the last norm, which the head reads."""
    out_BNC: Tensor = _decoder(model).norm(x_BNC)
    return out_BNC


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """Tokens of a text, all alike."""
    return ("text",) * input_spec(model).shape[0]


def grid(model: nn.Module, layer: str) -> None:
    """Tokens make no map."""


def depth(model: nn.Module) -> int:
    return len(_decoder(model).blocks)


def input_spec(model: nn.Module) -> SequenceSpec:
    decoder = _decoder(model)
    assert decoder.tokenization is not None, "a decoder that is reduced knows its texts"
    return SequenceSpec(
        tokenization=decoder.tokenization,
        tokenizer_json=decoder.tokenizer_json,
        vocabulary=decoder.architecture.vocabulary,
    )


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    return (LOGITS,)


def classes(model: nn.Module) -> int:
    """None: a word is no class of an input, and no label says one."""
    return 0


def exportable(model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
    """A copy in eval mode whose attention is spelled MatMul-Softmax-MatMul, for sequences of the model's length."""
    copied = replaced(model, sites(model).spelled_out(geometry))
    (tokens,) = input_spec(model).shape
    turning = {name: each for name, each in copied.named_modules() if isinstance(each, SequenceRotary)}
    settled = {name: each.of_length(tokens) for name, each in turning.items()}
    return replaced(copied, dict(settled)).eval().requires_grad_(False)


def beside(model: nn.Module) -> Mapping[str, str]:
    """The content of what stands beside the weights in a model directory, by file name."""
    return {TOKENIZER: _decoder(model).tokenizer_json}


def take_beside_(model: nn.Module, directory: Path) -> None:
    """Give a model just built the tokenizer of its directory. Raises BadInput for another one or none."""
    decoder = _decoder(model)
    assert decoder.tokenization is not None, "a model of a directory was built with it"
    decoder.tokenizer_json = content_of_tokenizer(directory, sha256=decoder.tokenization.sha256)
