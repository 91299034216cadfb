"""Causal language models as config.json of a model directory tells them, built to be traced; and as transformers
configures them: what of a config.json is read, and which entries say which widths.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from torch import Tensor, nn

from corp_deploy.spec.architecture import Architecture
from corp_deploy.traced.models.array_inputs import ArraySpec
from corp_deploy.traced.models.module import Facts, TracedModule, refuse_larger, traced_module
from ground.errors import BadInput
from ground.ports import OutputPort, Port
from ground.records import record_from_value

from .head_attention import Rope
from .text_config import TextConfig, architecture_from
from .text_decoder import DecoderArchitecture, DecoderBlock, TextDecoder
from .text_encoder import Eps, Heads, Rows, Width
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


class _Decoder(TextConfig, frozen=True, kw_only=True):
    """What those from before Llama have."""

    per_layer_config: Any = None
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    def reasons(self) -> dict[str, bool]:
        return TextConfig.reasons(self) | {
            "its layers have widths of their own (per_layer_config)": bool(self.per_layer_config),
            "it attends to an encoder": self.add_cross_attention,
        }

    def architecture(self, **own: Any) -> DecoderArchitecture:
        heads = self.num_attention_heads
        plain = {"gated": False, "rms": False, "qkv_bias": True, "proj_bias": True, "mlp_bias": True}
        every = {**self.sizes, "groups": heads, "tied": self.tie_word_embeddings, **plain, **own}
        if "head" not in own and self.hidden_size % heads:
            raise ValueError(f"a width of {self.hidden_size} is no multiple of {heads} heads")
        return DecoderArchitecture(**{"head": self.hidden_size // heads, **every})


class _Opt(_Decoder, frozen=True, kw_only=True):
    common: ClassVar[Mapping[str, str]] = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
    fixed: ClassVar[Mapping[str, Any]] = {"layer_norm_eps": 1e-5}
    hidden_act: str = "relu"
    word_embed_proj_dim: Width | None = None
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = msgspec.field(default=False, name="_remove_final_layer_norm")
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True

    def reasons(self) -> dict[str, bool]:
        return _Decoder.reasons(self) | {
            "its norms stand behind the branches (do_layer_norm_before false, as in OPT-350M)": (
                not self.do_layer_norm_before
            ),
            "its words are embedded in another width than its blocks have": (
                self.word_embed_proj_dim not in (None, self.hidden_size)
            ),
            "its last norm is left out": self.remove_final_layer_norm,
            "its linear layers have no biases": not self.enable_bias,
            "its norms have no weights": not self.layer_norm_elementwise_affine,
        }

    def architecture(self, **own: Any) -> DecoderArchitecture:
        positions = self.max_position_embeddings + 2
        return _Decoder.architecture(self, positions=positions, first_position=2, **own)


class _Gpt2(_Decoder, frozen=True, kw_only=True):
    common: ClassVar[Mapping[str, str]] = {
        "n_positions": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    intermediate_size: Width | None = None  # type: ignore[assignment]
    hidden_act: str = "gelu_new"
    layer_norm_eps: Eps = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    def reasons(self) -> dict[str, bool]:
        return _Decoder.reasons(self) | {
            "its scores are scaled otherwise than by the width of a head": (
                not self.scale_attn_weights or self.scale_attn_by_inverse_layer_idx
            ),
        }

    def architecture(self, **own: Any) -> DecoderArchitecture:
        return _Decoder.architecture(self, hidden=self.intermediate_size or 4 * self.hidden_size, **own)


class _Llama(_Decoder, frozen=True, kw_only=True):
    """Llama, and by the same names Mistral, Qwen2 and Qwen3."""

    common: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    num_key_value_heads: Heads | None = None
    head_dim: Width | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Rows = 2048
    layer_norm_eps: Eps = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    use_sliding_window: bool | None = None
    tie_word_embeddings: bool = False

    def architecture(self, **own: Any) -> DecoderArchitecture:
        windowed = self.use_sliding_window if self.model_type in ("qwen2", "qwen3") else self.model_type == "mistral"
        return _Decoder.architecture(
            self,
            groups=self.num_key_value_heads or self.num_attention_heads,
            **({"head": self.head_dim} if self.head_dim else {}),
            gated=True,
            rms=True,
            rope=_rope(self.rope_parameters or self.rope_scaling or {}, self.rope_theta),
            qkv_bias=self.model_type == "qwen2" or self.attention_bias,
            proj_bias=self.model_type != "qwen2" and self.attention_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.model_type == "qwen3",
            window=self.sliding_window if windowed else None,
            **own,
        )


_KINDS: Mapping[str, type[_Decoder]] = {
    "opt": _Opt,
    "gpt2": _Gpt2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _Llama),
}
MODEL_TYPES = tuple(_KINDS)
_ROPE_ENTRIES = {
    "rope_theta": "theta",
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}


def _rope(entries: Mapping[str, Any], theta: float) -> Rope:
    """Of `rope_parameters` as transformers writes them now, or of `rope_scaling` beside `rope_theta` as before."""
    kind = entries.get("rope_type", entries.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"positions scaled by {kind!r:.40}, expected default, linear or llama3")
    if entries.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("positions that turn a part of each head alone")
    own = {ours: entries[theirs] for theirs, ours in _ROPE_ENTRIES.items() if theirs in entries}
    return msgspec.convert({"theta": theta, **own, "scaling": kind}, Rope)


def architecture_from_transformers(config: Mapping[str, Any], *, where: str) -> DecoderArchitecture:
    """Raises BadInput for another kind of model, and for what no decoder here can do."""
    architecture = architecture_from(config, _KINDS, where=where, noun="decoder")
    assert isinstance(architecture, DecoderArchitecture), architecture
    return architecture
