"""Decoders as transformers configures them: what of a config.json is read, and which entries say which widths.

Nothing is executed: a configuration is typed and bounded where it is read, and what has no place here is refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from ground.errors import BadInput

from .head_attention import Rope
from .text_decoder import DecoderArchitecture
from .text_encoder import ACTIVATIONS, Eps, Heads, Layers, Rows, Width

Window = Annotated[int, Meta(ge=1, le=10_000_000)] | None
_PLAIN: Mapping[str, Any] = {"gated": False, "rms": False, "qkv_bias": True, "proj_bias": True, "mlp_bias": True}
"""Decoders from before Llama."""


class _Any(msgspec.Struct, frozen=True, kw_only=True):
    """What no model that is built here may have."""

    auto_map: Any = None
    quantization_config: Any = None
    pruned_heads: Any = None
    per_layer_config: Any = None
    add_cross_attention: bool = False

    def reasons(self) -> dict[str, bool]:
        """Why a model can't be built here, each with whether it holds."""
        return {
            "it comes with code of its own (auto_map), which is never run": bool(self.auto_map),
            "it is quantised; give the weights before that": self.quantization_config is not None,
            "some of its heads are removed already": bool(self.pruned_heads),
            "its layers have widths of their own (per_layer_config)": bool(self.per_layer_config),
            "it attends to an encoder": self.add_cross_attention,
        }


class _Opt(_Any, frozen=True, kw_only=True):
    vocab_size: Rows
    hidden_size: Width
    ffn_dim: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    max_position_embeddings: Rows
    word_embed_proj_dim: Width | None = None
    activation_function: str = "relu"
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = msgspec.field(default=False, name="_remove_final_layer_norm")
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True

    def reasons(self) -> dict[str, bool]:
        return _Any.reasons(self) | {
            "its norms stand behind the branches (do_layer_norm_before false, as in OPT-350M)": (
                not self.do_layer_norm_before
            ),
            "its words are embedded in another width than its blocks have": (
                self.word_embed_proj_dim not in (None, self.hidden_size)
            ),
            "its last norm is left out": self.remove_final_layer_norm,
            "its linear layers have no biases": not self.enable_bias,
            "its norms have no weights": not self.layer_norm_elementwise_affine,
            **_activation(self.activation_function),
        }

    def architecture(self) -> DecoderArchitecture:
        return DecoderArchitecture(
            vocabulary=self.vocab_size,
            positions=self.max_position_embeddings + 2,
            first_position=2,
            width=self.hidden_size,
            heads=self.num_attention_heads,
            groups=self.num_attention_heads,
            head=_head(self.hidden_size, self.num_attention_heads),
            hidden=self.ffn_dim,
            layers=self.num_hidden_layers,
            activation=self.activation_function,
            eps=1e-5,  # stands in transformers' code
            tied=self.tie_word_embeddings,
            **_PLAIN,
        )


class _Gpt2(_Any, frozen=True, kw_only=True):
    vocab_size: Rows
    n_positions: Rows
    n_embd: Width
    n_layer: Layers
    n_head: Heads
    n_inner: Width | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: Eps = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    def reasons(self) -> dict[str, bool]:
        return _Any.reasons(self) | {
            "its scores are scaled otherwise than by the width of a head": (
                not self.scale_attn_weights or self.scale_attn_by_inverse_layer_idx
            ),
            **_activation(self.activation_function),
        }

    def architecture(self) -> DecoderArchitecture:
        return DecoderArchitecture(
            vocabulary=self.vocab_size,
            positions=self.n_positions,
            width=self.n_embd,
            heads=self.n_head,
            groups=self.n_head,
            head=_head(self.n_embd, self.n_head),
            hidden=self.n_inner or 4 * self.n_embd,
            layers=self.n_layer,
            activation=self.activation_function,
            eps=self.layer_norm_epsilon,
            tied=self.tie_word_embeddings,
            **_PLAIN,
        )


class _Llama(_Any, frozen=True, kw_only=True):
    """Llama, and by the same names Mistral, Qwen2 and Qwen3."""

    model_type: str
    vocab_size: Rows
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Width | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Rows = 2048
    rms_norm_eps: Eps = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Window = None
    use_sliding_window: bool | None = None
    tie_word_embeddings: bool = False

    def reasons(self) -> dict[str, bool]:
        return _Any.reasons(self) | _activation(self.hidden_act)

    def architecture(self) -> DecoderArchitecture:
        qwen = self.model_type in ("qwen2", "qwen3")
        windowed = self.use_sliding_window if qwen else self.model_type == "mistral"
        return DecoderArchitecture(
            vocabulary=self.vocab_size,
            positions=self.max_position_embeddings,
            width=self.hidden_size,
            heads=self.num_attention_heads,
            groups=self.num_key_value_heads or self.num_attention_heads,
            head=self.head_dim or _head(self.hidden_size, self.num_attention_heads),
            hidden=self.intermediate_size,
            layers=self.num_hidden_layers,
            activation=self.hidden_act,
            eps=self.rms_norm_eps,
            rope=_rope(self.rope_parameters or self.rope_scaling or {}, self.rope_theta),
            qkv_bias=self.model_type == "qwen2" or self.attention_bias,
            proj_bias=self.model_type != "qwen2" and self.attention_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.model_type == "qwen3",
            window=self.sliding_window if windowed else None,
            tied=self.tie_word_embeddings,
        )


class _Config(Protocol):
    def reasons(self) -> dict[str, bool]: ...

    def architecture(self) -> DecoderArchitecture: ...


_CONFIGS: Mapping[str, type[_Any]] = {
    "opt": _Opt,
    "gpt2": _Gpt2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _Llama),
}
MODEL_TYPES = tuple(_CONFIGS)
_ROPE_ENTRIES = {
    "rope_theta": "theta",
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}


def _activation(name: str) -> dict[str, bool]:
    return {f"its activation is {name!r:.60}, expected {', '.join(ACTIVATIONS)}": name not in ACTIVATIONS}


def _head(width: int, heads: int) -> int:
    if width % heads:
        raise ValueError(f"a width of {width} is no multiple of {heads} heads")
    return width // heads


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
    """The decoder that a config.json of transformers describes. Raises BadInput for another kind of model, and for what
    no decoder here can do.
    """
    kind = str(config.get("model_type"))
    if kind not in _CONFIGS:
        raise BadInput(f"{where}: model_type is {kind!r:.60}, expected one of {', '.join(MODEL_TYPES)}")
    try:
        read: _Config = msgspec.convert(dict(config), _CONFIGS[kind])  # type: ignore[assignment]
        if reason := next((reason for reason, holds in read.reasons().items() if holds), ""):
            raise BadInput(f"{where}: this {kind} can't be built: {reason}")
        return read.architecture()
    except BadInput:
        raise
    except ValueError as error:  # msgspec's own are ValueErrors too
        raise BadInput(f"{where}: not the configuration of a {kind} decoder: {str(error)[:300]}") from None
