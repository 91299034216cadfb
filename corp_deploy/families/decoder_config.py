"""The reader of transformers' configurations of causal language models.

A configuration is plain values: types and bounds are checked where it is read, unsupported entries are refused, and no
code is run.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from ground.errors import BadInput

from .decoder import ACTIVATIONS, DecoderArchitecture, Eps, Heads, Layers, Rows, Width
from .rotary import Rope


class _Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """Base of decoders' configurations: the entries of all model types, under common names."""

    common: ClassVar[Mapping[str, str]] = {}
    """The common names of entries, by the names that this model type has for them."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Values that are written in the model type's code, not in its configuration."""

    model_type: str
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    hidden_act: str
    layer_norm_eps: Eps
    vocab_size: Rows
    intermediate_size: Width
    max_position_embeddings: Rows
    auto_map: Any = None
    quantization_config: Any = None
    pruned_heads: Any = None
    per_layer_config: Any = None
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    def reasons(self) -> dict[str, bool]:
        """Return the reasons against building a model here, each with whether it applies."""
        return {
            "it comes with code of its own (auto_map), which is never run": bool(self.auto_map),
            "it is quantised; give the weights before that": self.quantization_config is not None,
            "some of its heads are removed already": bool(self.pruned_heads),
            f"its activation is {self.hidden_act!r:.60}, expected {', '.join(ACTIVATIONS)}": (
                self.hidden_act not in ACTIVATIONS
            ),
            "its layers have widths of their own (per_layer_config)": bool(self.per_layer_config),
            "it attends to an encoder": self.add_cross_attention,
        }

    def own(self) -> dict[str, Any]:
        """Return the fields of the architecture in which this model type differs from most others."""
        return {}

    def architecture(self) -> DecoderArchitecture:
        heads = self.num_attention_heads
        fields = {
            "vocabulary": self.vocab_size,
            "positions": self.max_position_embeddings,
            "width": self.hidden_size,
            "heads": heads,
            "groups": heads,
            "hidden": self.intermediate_size,
            "layers": self.num_hidden_layers,
            "activation": self.hidden_act,
            "eps": self.layer_norm_eps,
            "tied": self.tie_word_embeddings,
            "gated": False,
            "rms": False,
            "qkv_bias": True,
            "proj_bias": True,
            "mlp_bias": True,
            **self.own(),
        }
        if "head" not in fields and self.hidden_size % heads:
            raise ValueError(f"a width of {self.hidden_size} is no multiple of {heads} heads")
        return DecoderArchitecture(**{"head": self.hidden_size // heads, **fields})


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
            "its norms come after the branches (do_layer_norm_before false, as in OPT-350M)": (
                not self.do_layer_norm_before
            ),
            "its embeddings have another width than its blocks": (
                self.word_embed_proj_dim not in (None, self.hidden_size)
            ),
            "its last norm is left out": self.remove_final_layer_norm,
            "its linear layers have no biases": not self.enable_bias,
            "its norms have no weights": not self.layer_norm_elementwise_affine,
        }

    def own(self) -> dict[str, Any]:
        return {"positions": self.max_position_embeddings + 2, "first_position": 2}


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

    def own(self) -> dict[str, Any]:
        return {"hidden": self.intermediate_size or 4 * self.hidden_size}


class _Llama(_Decoder, frozen=True, kw_only=True):
    """The configuration of Llama, and of Mistral, Qwen2 and Qwen3, whose entries have the same names."""

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

    def own(self) -> dict[str, Any]:
        windowed = self.use_sliding_window if self.model_type in ("qwen2", "qwen3") else self.model_type == "mistral"
        return {
            "groups": self.num_key_value_heads or self.num_attention_heads,
            **({"head": self.head_dim} if self.head_dim else {}),
            "gated": True,
            "rms": True,
            "rope": _rope(self.rope_parameters or self.rope_scaling or {}, self.rope_theta),
            "qkv_bias": self.model_type == "qwen2" or self.attention_bias,
            "proj_bias": self.model_type != "qwen2" and self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "qk_norm": self.model_type == "qwen3",
            "window": self.sliding_window if windowed else None,
        }


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


def hidden_entry(model_type: str) -> str:
    """Return the name of the configuration entry that has the width of MLPs."""
    common = _KINDS[model_type].common
    return next((theirs for theirs, ours in common.items() if ours == "intermediate_size"), "intermediate_size")


def _rope(entries: Mapping[str, Any], theta: float) -> Rope:
    """Return the rotary positions of `rope_parameters`, or of `rope_scaling` and `rope_theta` in older files."""
    kind = entries.get("rope_type", entries.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"positions scaled by {kind!r:.40}, expected default, linear or llama3")
    if entries.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("positions that turn a part of each head alone")
    own = {ours: entries[theirs] for theirs, ours in _ROPE_ENTRIES.items() if theirs in entries}
    return msgspec.convert({"theta": theta, **own, "scaling": kind}, Rope)


def architecture_from_transformers(config: Mapping[str, Any], *, where: str) -> DecoderArchitecture:
    """Return the architecture that a config.json describes. Raises BadInput for an unsupported model or entry."""
    name = config.get("model_type")
    if name not in MODEL_TYPES:
        raise BadInput(f"{where}: model_type is {name!r:.60}, expected one of {', '.join(MODEL_TYPES)}")
    common = _KINDS[name].common
    own = {common.get(key, key): value for key, value in config.items() if key in common or key not in common.values()}
    try:
        read = msgspec.convert({**own, **_KINDS[name].fixed}, _KINDS[name])
        if reason := next((reason for reason, holds in read.reasons().items() if holds), ""):
            raise BadInput(f"{where}: this {name} can't be built: {reason}")
        return read.architecture()
    except BadInput:
        raise
    except ValueError as error:  # msgspec's own are ValueErrors too
        words = str(error)[:300]
        for theirs, ours in common.items():
            words = words.replace(f"$.{ours}", f"$.{theirs}").replace(f"`{ours}`", f"`{theirs}`")
        raise BadInput(f"{where}: not the configuration of a {name} decoder: {words}") from None
