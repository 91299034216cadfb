"""Encoders of BERT's kind as transformers writes them: config.json and the names of their tensors.

Nothing is executed: a configuration is typed and bounded where it is read, and a tensor without a place is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from torch import Tensor

from ground.errors import BadInput

from .text_encoder import ACTIVATIONS, EncoderArchitecture, Eps, Heads, Layers, Rows, TokenTypes, Width
from .transformers_names import Names, block_from, by_block, outside_from, refuse_foreign


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a config.json of transformers, by BERT's names."""

    model_type: str
    vocab_size: Rows
    hidden_size: Width
    num_attention_heads: Heads
    intermediate_size: Width
    num_hidden_layers: Layers
    max_position_embeddings: Rows
    type_vocab_size: TokenTypes = 2
    hidden_act: str = "gelu"
    layer_norm_eps: Eps = 1e-12
    pad_token_id: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    position_embedding_type: str = "absolute"
    embedding_size: int | None = None
    is_decoder: bool = False
    add_cross_attention: bool = False
    auto_map: Any = None
    quantization_config: Any = None
    pruned_heads: Any = None


# What DistilBERT calls the same things; its layer norms' eps and the missing token types stand in its code.
_OF_DISTILBERT = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "activation": "hidden_act",
}
_OFFSET = ("roberta", "xlm-roberta", "camembert")


def _refusal(config: _Config) -> str:
    """Why this model can't be built here, or nothing."""
    kind = config.position_embedding_type
    reasons = {
        f"its position embeddings are {kind!r:.60}, absolute ones alone are built": kind != "absolute",
        "it comes with code of its own (auto_map), which is never run": bool(config.auto_map),
        "it is a decoder": config.is_decoder or config.add_cross_attention,
        "it is quantised; give the weights before that": config.quantization_config is not None,
        "some of its heads are removed already": bool(config.pruned_heads),
        f"its embeddings are {config.embedding_size} wide and its blocks {config.hidden_size}, with a projection "
        "between": config.embedding_size not in (None, config.hidden_size),
        f"its activation is {config.hidden_act!r:.60}, expected {', '.join(ACTIVATIONS)}": (
            config.hidden_act not in ACTIVATIONS
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def architecture_from_transformers(config: Mapping[str, Any], *, where: str) -> EncoderArchitecture:
    """The encoder that a config.json of transformers describes, pooled by the mean and not normalised.

    Raises BadInput for another kind of model, and for what no such encoder here can do.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise BadInput(f"{where}: model_type is {kind!r:.60}, expected one of {', '.join(MODEL_TYPES)}")
    distilled = {"type_vocab_size": 0, "layer_norm_eps": 1e-12} if kind == "distilbert" else {}
    theirs = _OF_DISTILBERT if kind == "distilbert" else {}
    try:
        read = msgspec.convert({**{theirs.get(key, key): value for key, value in config.items()}, **distilled}, _Config)
        if reason := _refusal(read):
            raise BadInput(f"{where}: this {kind} can't be built: {reason}")
        return EncoderArchitecture(
            vocabulary=read.vocab_size,
            positions=read.max_position_embeddings,
            first_position=(1 if read.pad_token_id is None else read.pad_token_id) + 1 if kind in _OFFSET else 0,
            token_types=read.type_vocab_size,
            width=read.hidden_size,
            heads=read.num_attention_heads,
            hidden=read.intermediate_size,
            layers=read.num_hidden_layers,
            activation=read.hidden_act,
            eps=read.layer_norm_eps,
        )
    except BadInput:
        raise
    except ValueError as error:  # msgspec's own are ValueErrors too
        words = str(error)[:300]
        for own, common in theirs.items():
            words = words.replace(f"$.{common}", f"$.{own}")
        raise BadInput(f"{where}: not the configuration of a {kind} encoder: {words}") from None


_OUTSIDE = {
    f"embeddings.{theirs}.{entry}": f"embeddings.{ours}.{entry}"
    for theirs, ours, entries in (
        ("word_embeddings", "word", ("weight",)),
        ("position_embeddings", "position", ("weight",)),
        ("token_type_embeddings", "token_type", ("weight",)),
        ("LayerNorm", "norm", ("weight", "bias")),
    )
    for entry in entries
}
_BERT = Names(
    base="bert.",
    blocks="encoder.layer.",
    outside=_OUTSIDE,
    parts={
        "attn.proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
        "norm2": "output.LayerNorm",
    },
    fused=("attention.self.query", "attention.self.key", "attention.self.value"),
)
_ROBERTA = replace(_BERT, base="roberta.")
_DISTILBERT = Names(
    base="distilbert.",
    blocks="transformer.layer.",
    outside=_OUTSIDE,
    parts={
        "attn.proj": "attention.out_lin",
        "norm1": "sa_layer_norm",
        "mlp.fc1": "ffn.lin1",
        "mlp.fc2": "ffn.lin2",
        "norm2": "output_layer_norm",
    },
    fused=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
)
NAMES: Mapping[str, Names] = {
    "bert": _BERT,
    **dict.fromkeys(_OFFSET, _ROBERTA),
    "distilbert": _DISTILBERT,
    "electra": replace(_BERT, base="electra."),
}
MODEL_TYPES = tuple(NAMES)


def hidden_entry(model_type: str) -> str:
    """The entry of their configuration that says how wide an MLP is."""
    return "hidden_dim" if model_type == "distilbert" else "intermediate_size"


def prefix_in(state: Mapping[str, Tensor], model_type: str) -> str:
    """The name of the encoder in a file's model, with its dot; empty where the file is the encoder's own."""
    prefix = NAMES[model_type].base
    return prefix if any(name.startswith(f"{prefix}embeddings.") for name in state) else ""


def _named_now(name: str) -> str:
    """Norms of old files have a gamma and a beta."""
    return name.replace(".gamma", ".weight").replace(".beta", ".bias")


def state_from_transformers(
    state: Mapping[str, Tensor], *, model_type: str, where: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """A state dict under this model's names, and the names that belong to no encoder and are left out: poolers and
    heads of tasks.

    Raises BadInput for a tensor of the encoder that has no place here.
    """
    names, what = NAMES[model_type], f"{model_type} encoder"
    outside, blocks = by_block(state, names, where=where)
    mapped, others = outside_from({_named_now(own): state[name] for own, name in outside.items()}, names)
    refuse_foreign([name for name in others if name.startswith(("embeddings.", names.blocks))], what, where=where)
    for index, inside in blocks.items():
        own = {_named_now(within): state[name] for within, name in inside.items()}
        block = block_from(own, names, what, where=f"{where}: blocks.{index}")
        mapped |= {f"blocks.{index}.{name}": tensor for name, tensor in block.items()}
    return mapped, tuple(sorted(name for own, name in outside.items() if not own.startswith("embeddings.")))
