"""An encoder of BERT's kind in plain torch: tokens -> post-norm blocks -> one embedding for each text.

BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT and ELECTRA's encoder differ in names and in where positions begin;
here they are one model, with the q, k and v of a layer in one fused projection. Padding stands on the right.

Legend: B texts, N tokens, C channels.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional as F

from .head_attention import HeadAttention

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


class TextArchitecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What encoders and decoders have. `positions` are rows of a table, of which the first `first_position` stand for
    no place in a text.
    """

    vocabulary: Rows
    positions: Rows
    first_position: Annotated[int, Meta(ge=0, le=65_536)] = 0
    width: Width
    heads: Heads
    hidden: Width
    layers: Layers
    activation: str = "gelu"
    eps: Eps = 1e-12

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"{self.positions} positions, of which the first {self.first_position} are no places")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r:.60}, expected one of {', '.join(ACTIVATIONS)}")

    @property
    def longest(self) -> int:
        """The most tokens that a text may have."""
        return self.positions - self.first_position


class EncoderArchitecture(TextArchitecture, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that it takes to build an encoder; `token_types` may be 0."""

    token_types: TokenTypes = 0
    pooling: Pooling = "mean"
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} is no multiple of {self.heads} heads")
        TextArchitecture.__post_init__(self)


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
        return self.norm(x_BNC + self.position.weight[first : first + tokens])


class Mlp(nn.Module):
    """fc1, activation, fc2."""

    def __init__(self, width: int, hidden: int, activation: str, *, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.act = ACTIVATIONS[activation]()
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x_BNC)))


class Block(nn.Module):
    """x = norm1(x + attn(x)); x = norm2(x + mlp(x))."""

    def __init__(self, architecture: EncoderArchitecture) -> None:
        super().__init__()
        width, heads = architecture.width, architecture.heads
        self.attn = HeadAttention(dim=width, heads=heads, head=width // heads, qkv_bias=True, proj_bias=True)
        self.norm1 = nn.LayerNorm(width, eps=architecture.eps)
        self.mlp = Mlp(width, architecture.hidden, architecture.activation)
        self.norm2 = nn.LayerNorm(width, eps=architecture.eps)

    def forward(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        x_BNC = self.norm1(x_BNC + self.attn(x_BNC, weights_BN))
        return self.norm2(x_BNC + self.mlp(x_BNC))


class TextEncoder(nn.Module):
    """input_ids and attention_mask [B,N], 1 for a token and 0 for padding behind it -> one embedding a text [B,C]."""

    def __init__(self, architecture: EncoderArchitecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.embeddings = Embeddings(architecture)
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(architecture.layers))

    def tokens(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """What the last block gives [B,N,C]; where padding stands, nothing that counts."""
        x_BNC: Tensor = self.embeddings(input_ids)
        for block in self.blocks:
            x_BNC = block(x_BNC, attention_mask)
        return x_BNC

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x_BNC = self.tokens(input_ids, attention_mask)
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
