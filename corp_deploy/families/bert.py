"""Text encoders of BERT's kind: tokens -> post-norm blocks -> one embedding for each text.

BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT and ELECTRA's encoder differ in names and in where positions begin;
here they are one model, with the q, k and v of a layer in one fused projection. Padding stands on the right.

Legend: B texts, N tokens, C channels.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional as F

from calib.inputs import Inputs, named
from ground.errors import BadInput
from ground.ports import OutputPort

from .architecture import Architecture
from .channel_site import ChannelSite
from .head_attention import HeadAttention
from .head_site import HeadSite
from .modules import replaced
from .sites import Sites
from .steps import Branch, Passage, Step
from .tokenizer import FILE as TOKENIZER
from .tokenizer import TextSpec, Tokenization, content_of_tokenizer
from .widths import HeadGeometry

NAME = "bert"
FIXED_PARTS: tuple[str, ...] = ()
MOST_PARAMETERS = 20_000_000_000
EMBEDDING = OutputPort(name="embedding", role="embedding")

Pooling = Literal["mean", "first"]
Width = Annotated[int, Meta(ge=1, le=65_536)]
Rows = Annotated[int, Meta(ge=2, le=10_000_000)]
Heads = Annotated[int, Meta(ge=1, le=1024)]
Layers = Annotated[int, Meta(ge=1, le=256)]
Eps = Annotated[float, Meta(gt=0.0, le=1.0)]
TokenTypes = Annotated[int, Meta(ge=0, le=1024)]

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_new": lambda: nn.GELU(approximate="tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
}


class EncoderArchitecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that it takes to build an encoder. `positions` are rows of the table, of which the first `first_position`
    stand for no place in a text; `token_types` may be 0.
    """

    vocabulary: Rows
    positions: Rows
    first_position: Annotated[int, Meta(ge=0, le=65_536)] = 0
    token_types: TokenTypes = 0
    width: Width
    heads: Heads
    hidden: Width
    layers: Layers
    activation: str = "gelu"
    eps: Eps = 1e-12
    pooling: Pooling = "mean"
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} is no multiple of {self.heads} heads")
        if self.longest < 1:
            raise ValueError(f"{self.positions} positions, of which the first {self.first_position} are no places")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r:.60}, expected one of {', '.join(ACTIVATIONS)}")

    @property
    def longest(self) -> int:
        """The most tokens that a text may have."""
        return self.positions - self.first_position


class Embeddings(nn.Module):
    """Token ids [B,N] -> [B,N,C]: word, place and the first token type, added up and normalised."""

    def __init__(self, architecture: EncoderArchitecture) -> None:
        super().__init__()
        width = architecture.width
        self.first_position = architecture.first_position
        self.word = nn.Embedding(architecture.vocabulary, width)
        self.position = nn.Embedding(architecture.positions, width)
        self.token_type = nn.Embedding(architecture.token_types, width) if architecture.token_types else None
        self.norm = nn.LayerNorm(width, eps=architecture.eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        first, tokens = self.first_position, input_ids.shape[1]
        x_BNC = self.word(input_ids)
        if self.token_type is not None:
            x_BNC = x_BNC + self.token_type.weight[0]
        out: Tensor = self.norm(x_BNC + self.position.weight[first : first + tokens])
        return out


class Mlp(nn.Module):
    """fc1, activation, fc2."""

    def __init__(self, architecture: EncoderArchitecture) -> None:
        super().__init__()
        self.fc1 = nn.Linear(architecture.width, architecture.hidden)
        self.act = ACTIVATIONS[architecture.activation]()
        self.fc2 = nn.Linear(architecture.hidden, architecture.width)

    def forward(self, x_BNC: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x_BNC)))
        return out


class Block(nn.Module):
    """x = norm1(x + attn(x)); x = norm2(x + mlp(x))."""

    def __init__(self, architecture: EncoderArchitecture) -> None:
        super().__init__()
        width, heads = architecture.width, architecture.heads
        size = width // heads
        self.attn = HeadAttention(
            dim=width,
            heads=heads,
            qk=size,
            v=size,
            scale=size**-0.5,
            geometry="square",
            qkv_bias=True,
            proj_bias=True,
        )
        self.norm1 = nn.LayerNorm(width, eps=architecture.eps)
        self.mlp = Mlp(architecture)
        self.norm2 = nn.LayerNorm(width, eps=architecture.eps)

    def forward(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        x_BNC = self.norm1(x_BNC + self.attn(x_BNC, weights_BN))
        out: Tensor = self.norm2(x_BNC + self.mlp(x_BNC))
        return out


class TextEncoder(nn.Module):
    """input_ids and attention_mask [B,N], 1 for a token and 0 for padding behind it -> one embedding a text [B,C]."""

    def __init__(self, architecture: EncoderArchitecture, tokenization: Tokenization | None = None) -> None:
        """`tokenization` and the content of its tokenizer.json go with the model, as texts are nothing without them."""
        super().__init__()
        self.architecture = architecture
        self.tokenization = tokenization
        self.tokenizer_json = ""
        self.embeddings = Embeddings(architecture)
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(architecture.layers))

    def tokens(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """What the last block gives [B,N,C]; where padding stands, nothing that counts."""
        x_BNC: Tensor = self.embeddings(input_ids)
        for block in self.blocks:
            x_BNC = block(x_BNC, attention_mask)
        return x_BNC

    def pooled(self, x_BNC: Tensor, attention_mask: Tensor) -> Tensor:
        """One embedding a text [B,C] of what the last block gave."""
        if self.architecture.pooling == "first":
            out_BC = x_BNC[:, 0]
        else:
            # Weights before the sum, in float32: a sum of hundreds of float16 tokens would be near its end.
            weights_BN = attention_mask.to(torch.float32)
            weights_BN = weights_BN / weights_BN.sum(dim=1, keepdim=True).clamp(min=1.0)
            out_BC = (x_BNC.to(torch.float32) * weights_BN.unsqueeze(-1)).sum(dim=1)
        if self.architecture.normalize:
            out_BC = F.normalize(out_BC.to(torch.float32), dim=-1)
        return out_BC.to(x_BNC.dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.pooled(self.tokens(input_ids, attention_mask), attention_mask)


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
        parameters = sum(each.numel() for each in TextEncoder(arguments.encoder).parameters())
    if parameters > MOST_PARAMETERS:
        raise BadInput(f"an encoder of {parameters:,} parameters; {MOST_PARAMETERS:,} at most are built")
    return TextEncoder(arguments.encoder, arguments.text).eval()


def _channel_site(name: str, mlp: nn.Module) -> ChannelSite:
    assert isinstance(mlp, Mlp), (name, mlp)
    return ChannelSite(name=name, first=mlp.fc1, last=mlp.fc2, first_name=f"{name}.fc1", last_name=f"{name}.fc2")


def _head_site(name: str, attention: nn.Module) -> HeadSite:
    assert isinstance(attention, HeadAttention), (name, attention)
    return HeadSite(
        name=name,
        module=attention,
        first=attention.qkv,
        last=attention.proj,
        heads=attention.heads,
        qk=attention.qk,
        v=attention.v,
        scale=attention.scale,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        geometry=attention.geometry,
    )


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


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs) -> Tensor:
    """One embedding a text [B,C]."""
    return _encoder(model).pooled(x_BNC, named(inputs)["attention_mask"])


def last_block(model: nn.Module) -> nn.Module:
    return _encoder(model).blocks[-1]


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """The mark of a text's start, and everything behind it."""
    return ("first", *["text"] * (input_spec(model).shape[0] - 1))


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


def exportable(model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
    """A copy in eval mode whose attention is spelled MatMul-Softmax-MatMul."""
    copied = replaced(model, {site.name: site.plain(geometry) for site in sites(model).heads})
    return copied.eval().requires_grad_(False)


def beside(model: nn.Module) -> Mapping[str, str]:
    """The content of what stands beside the weights in a model directory, by file name."""
    return {TOKENIZER: _encoder(model).tokenizer_json}


def take_beside_(model: nn.Module, directory: Path) -> None:
    """Give a model just built the tokenizer of its directory. Raises BadInput for another one or none."""
    encoder = _encoder(model)
    assert encoder.tokenization is not None, "a model of a directory was built with it"
    encoder.tokenizer_json = content_of_tokenizer(directory, sha256=encoder.tokenization.sha256)
