"""A causal language model in plain torch: tokens -> pre-norm blocks -> logits of the next token at each position.

OPT, GPT-2, Llama, Mistral, Qwen2 and Qwen3 differ in their norms, in their positions (learned rows, rotary planes), in
groups of queries that share keys and values, in gates and biases; here they are one model, with the q, k and v of a
layer in one fused projection. Sequences are full: none is padded.

Encoders are transformers' own classes. Decoders are written here because `calibrate --sequential` builds and fills one
block at a time, and `export-decoder` checks a directory's tensors against them before another package reads it.

Legend: B sequences, N tokens, C channels, G groups of heads, H heads, D width of a head, V words.
"""

from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.spec.architecture import Architecture
from corp_deploy.traced.models.array_inputs import ArraySpec
from corp_deploy.traced.models.module import Facts, TracedModule, refuse_larger, traced_module
from ground.errors import BadInput
from ground.ports import OutputPort, Port
from ground.records import record_from_value

from .rotary import Rope, SequenceRotary
from .tokenizer import SequenceSpec, Tokenization

Width = Annotated[int, Meta(ge=1, le=65_536)]
Rows = Annotated[int, Meta(ge=2, le=10_000_000)]
Heads = Annotated[int, Meta(ge=1, le=1024)]
Layers = Annotated[int, Meta(ge=1, le=256)]
Eps = Annotated[float, Meta(gt=0.0, le=1.0)]

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_new": lambda: nn.GELU(approximate="tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
}


class DecoderArchitecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes and options that build a decoder.

    `head` is the width of a head; `groups` of heads share keys and values. `positions` counts the rows of the table of
    positions, of which the first `first_position` are unused. `rope` has the rotary positions, None for a table. `rms`
    selects norms without means (RMSNorm, arXiv 1910.07467). `window` is the number of tokens that a token sees, and
    longer sequences are refused. `tied` uses the words' embeddings as the rows of the last layer.
    """

    vocabulary: Rows
    positions: Rows
    first_position: Annotated[int, Meta(ge=0, le=65_536)] = 0
    width: Width
    heads: Heads
    hidden: Width
    layers: Layers
    groups: Heads
    head: Width
    activation: str = "silu"
    gated: bool = True
    rms: bool = True
    eps: Eps = 1e-6
    rope: Rope | None = None
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} heads are no multiple of {self.groups} groups that share keys and values")
        if self.rope is not None and self.head % 2:
            raise ValueError(f"heads of {self.head} dimensions, expected an even number for rotary positions")
        if self.longest < 1:
            raise ValueError(f"{self.positions} positions, of which the first {self.first_position} are unused")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r:.60}, expected one of {', '.join(ACTIVATIONS)}")

    @property
    def longest(self) -> int:
        """The largest number of tokens of a sequence that has positions and in which each token sees all before it."""
        places = self.positions - (0 if self.rope else self.first_position)
        return places if self.window is None else min(places, self.window)


class RmsNorm(nn.Module):
    """RMSNorm: x / rms(x), times a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _norm(architecture: DecoderArchitecture, width: int | None = None) -> nn.Module:
    width, eps = width or architecture.width, architecture.eps
    return RmsNorm(width, eps) if architecture.rms else nn.LayerNorm(width, eps=eps)


class Embeddings(nn.Module):
    """Embeddings of token ids [B,N] -> [B,N,C], plus those of positions unless positions are rotary."""

    def __init__(self, architecture: DecoderArchitecture) -> None:
        super().__init__()
        self.first_position = architecture.first_position
        self.word = nn.Embedding(architecture.vocabulary, architecture.width)
        has_table = architecture.rope is None
        self.position = nn.Embedding(architecture.positions, architecture.width) if has_table else None

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BNC: Tensor = self.word(input_ids)
        if self.position is None:
            return x_BNC
        first = self.first_position
        return x_BNC + self.position.weight[first : first + input_ids.shape[1]]


class Mlp(nn.Module):
    """MLP fc2(activation(fc1(x)))."""

    def __init__(self, architecture: DecoderArchitecture) -> None:
        super().__init__()
        self.fc1 = nn.Linear(architecture.width, architecture.hidden, bias=architecture.mlp_bias)
        self.act = ACTIVATIONS[architecture.activation]()
        self.fc2 = nn.Linear(architecture.hidden, architecture.width, bias=architecture.mlp_bias)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x_BNC)))


class GatedMlp(nn.Module):
    """Gated MLP down(activation(gate(x)) * up(x)), such as SwiGLU (arXiv 2002.05202)."""

    def __init__(self, architecture: DecoderArchitecture) -> None:
        super().__init__()
        self.gate = nn.Linear(architecture.width, architecture.hidden, bias=architecture.mlp_bias)
        self.up = nn.Linear(architecture.width, architecture.hidden, bias=architecture.mlp_bias)
        self.act = ACTIVATIONS[architecture.activation]()
        self.down = nn.Linear(architecture.hidden, architecture.width, bias=architecture.mlp_bias)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x_BNC)) * self.up(x_BNC))


class HeadAttention(nn.Module):
    """Causal multi-head self-attention [B,N,C] -> [B,N,C] with the fixed softmax scale head**-0.5.

    With grouped queries (arXiv 2305.13245) consecutive heads of each group share keys and values, so that `qkv` has
    rows of q (heads * head), k and v (groups * head each).
    """

    rotary: SequenceRotary | None

    def __init__(self, architecture: DecoderArchitecture) -> None:
        super().__init__()
        head, rope = architecture.head, architecture.rope
        self.counts = architecture.heads, architecture.groups, architecture.groups
        self.rows = [count * head for count in self.counts]
        self.scale = head**-0.5
        self.qkv = nn.Linear(architecture.width, sum(self.rows), bias=architecture.qkv_bias)
        self.q_norm = _norm(architecture, head) if architecture.qk_norm else nn.Identity()
        self.k_norm = _norm(architecture, head) if architecture.qk_norm else nn.Identity()
        self.rotary = None if rope is None else SequenceRotary(rope.frequencies(head // 2).unsqueeze(0))
        self.proj = nn.Linear(architecture.heads * head, architecture.width, bias=architecture.proj_bias)

    def forward(self, x_BNC: Tensor) -> Tensor:
        projected = zip(self.qkv(x_BNC).split(self.rows, -1), self.counts, strict=True)
        q, k, v = (rows.unflatten(-1, (count, -1)).transpose(-3, -2) for rows, count in projected)
        q, k = self.q_norm(q), self.k_norm(k)
        heads, groups, _ = self.counts
        if groups != heads:
            k, v = (each.repeat_interleave(heads // groups, dim=-3) for each in (k, v))
        if self.rotary is not None:
            q, k = self.rotary(q, k)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.proj(z.transpose(-3, -2).flatten(-2))


class DecoderBlock(nn.Module):
    """Pre-norm block: x = x + attn(norm1(x)); x = x + mlp(norm2(x))."""

    def __init__(self, architecture: DecoderArchitecture) -> None:
        super().__init__()
        self.norm1 = _norm(architecture)
        self.attn = HeadAttention(architecture)
        self.norm2 = _norm(architecture)
        self.mlp = GatedMlp(architecture) if architecture.gated else Mlp(architecture)

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC = x_BNC + self.attn(self.norm1(x_BNC))
        return x_BNC + self.mlp(self.norm2(x_BNC))


class TextDecoder(nn.Module):
    """Decoder of input_ids [B,N] -> logits of the next token at each position [B,N,V]."""

    def __init__(self, architecture: DecoderArchitecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.embeddings = Embeddings(architecture)
        self.blocks = nn.ModuleList(DecoderBlock(architecture) for _ in range(architecture.layers))
        self.norm = _norm(architecture)
        self.head = None if architecture.tied else nn.Linear(architecture.width, architecture.vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BNC: Tensor = self.embeddings(input_ids)
        for block in self.blocks:
            x_BNC = block(x_BNC)
        x_BNC = self.norm(x_BNC)
        return F.linear(x_BNC, self.embeddings.word.weight) if self.head is None else self.head(x_BNC)


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
    """A block whose tensors have their names of the whole model, such as blocks.3.attn.qkv.weight."""

    def __init__(self, index: int, block: DecoderBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): block})
        self.at = str(index)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.blocks[self.at](x_BNC)


def traced_block(index: int, block: DecoderBlock, arguments: DecoderArguments) -> TracedModule:
    """Return one block as a traced model [B,N,C] -> [B,N,C], with the sites that it has in the whole model."""
    stream = Port(name="entering", shape=(arguments.text.length, arguments.decoder.width))
    leaving = OutputPort(name="leaving", role="feature map")
    facts = Facts(spec=ArraySpec(ports=(stream,)), outputs=(leaving,), classes=0, biasless=True, multiple=_MULTIPLE)
    return traced_module(_Block(index, block), facts)
