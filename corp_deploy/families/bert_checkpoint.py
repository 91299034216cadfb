"""Encoders of BERT's kind as transformers writes them: config.json and the names of their tensors.

Nothing is executed: a configuration is typed and bounded where it is read, and a tensor without a place is refused.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from ground.errors import BadInput

from .text_encoder import ACTIVATIONS, EncoderArchitecture, Eps, Heads, Layers, Rows, TokenTypes, Width


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
_PREFIXES = {
    "bert": "bert.",
    "roberta": "roberta.",
    "xlm-roberta": "roberta.",
    "camembert": "roberta.",
    "distilbert": "distilbert.",
    "electra": "electra.",
}
MODEL_TYPES = tuple(_PREFIXES)
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


# Of BERT and of DistilBERT: their path of a layer norm or linear layer in a block, and the one here.
_IN_BLOCK = {
    "attention.output.dense": "attn.proj",
    "attention.out_lin": "attn.proj",
    "attention.output.LayerNorm": "norm1",
    "sa_layer_norm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "ffn.lin1": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "ffn.lin2": "mlp.fc2",
    "output.LayerNorm": "norm2",
    "output_layer_norm": "norm2",
}
_FUSED = ("attention.self.query", "attention.self.key", "attention.self.value")
_FUSED_OF_DISTILBERT = ("attention.q_lin", "attention.k_lin", "attention.v_lin")
_IN_EMBEDDINGS = {
    "word_embeddings": "word",
    "position_embeddings": "position",
    "token_type_embeddings": "token_type",
    "LayerNorm": "norm",
}
_BLOCK = re.compile(r"(?:encoder|transformer)\.layer\.(\d{1,4})\.(.+)\.(weight|bias|gamma|beta)")
_EMBEDDING = re.compile(r"embeddings\.(\w+)\.(weight|bias|gamma|beta)")
_ENCODER = ("embeddings.", "encoder.layer.", "transformer.layer.")
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OLD = {"gamma": "weight", "beta": "bias"}


def name_in_block(path: str, model_type: str) -> str:
    """Of BERT or DistilBERT: their path of what is here a block's layer norm or linear layer."""
    bert, distilbert = [theirs for theirs, ours in _IN_BLOCK.items() if ours == path]
    return distilbert if model_type == "distilbert" else bert


def name_in_embeddings(path: str) -> str:
    """Their name of a part of the embeddings."""
    (theirs,) = [theirs for theirs, ours in _IN_EMBEDDINGS.items() if ours == path]
    return theirs


def fused_names(model_type: str) -> tuple[str, str, str]:
    """Their paths of the projections that are one here: queries, keys, values."""
    return _FUSED_OF_DISTILBERT if model_type == "distilbert" else _FUSED


def hidden_entry(model_type: str) -> str:
    """The entry of their configuration that says how wide an MLP is."""
    return "hidden_dim" if model_type == "distilbert" else "intermediate_size"


def prefix_in(state: Mapping[str, Tensor], model_type: str) -> str:
    """The name of the encoder in a file's model, with its dot; empty where the file is the encoder's own."""
    prefix = _PREFIXES[model_type]
    return prefix if any(name.startswith(f"{prefix}embeddings.") for name in state) else ""


def _encoder(state: Mapping[str, Tensor], prefix: str, where: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The encoder's tensors without the name of the model that they are in, and the names of what stands beside it."""
    encoder: dict[str, Tensor] = {}
    beside: list[str] = []
    for name, tensor in state.items():
        own = name.removeprefix(prefix)
        if own in encoder:
            raise BadInput(f"{where}: {own!r:.150} is there with and without {prefix!r}; save one of the two")
        if not own.startswith(_ENCODER):
            beside.append(name)
        elif own not in _BUFFERS:
            encoder[own] = tensor
    return encoder, tuple(sorted(beside))


def _joined(at: str, blocks: Mapping[str, dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """qkv of a block from its three projections."""
    names = _FUSED if any(name in blocks for name in _FUSED) else _FUSED_OF_DISTILBERT
    joined = {}
    for kind in ("weight", "bias"):
        projections = [blocks.get(name, {}).get(kind) for name in names]
        present = [each for each in projections if each is not None]
        if len(present) < len(projections) or len({each.shape for each in present}) > 1:
            raise BadInput(f"{where}: {at}: expected {', '.join(names)} with a {kind} each, of one shape")
        joined[f"attn.qkv.{kind}"] = torch.cat(present)
    return joined


def state_from_transformers(
    state: Mapping[str, Tensor], *, model_type: str, where: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """A state dict under this model's names, and the names that belong to no encoder and are left out: poolers and
    heads of tasks.

    Raises BadInput for a tensor of the encoder that has no place here.
    """
    encoder, beside = _encoder(state, _PREFIXES[model_type], where)
    mapped: dict[str, Tensor] = {}
    fused: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, tensor in encoder.items():
        if (match := _EMBEDDING.fullmatch(name)) and match[1] in _IN_EMBEDDINGS:
            mapped[f"embeddings.{_IN_EMBEDDINGS[match[1]]}.{_OLD.get(match[2], match[2])}"] = tensor
        elif (match := _BLOCK.fullmatch(name)) and match[2] in _IN_BLOCK:
            mapped[f"blocks.{int(match[1])}.{_IN_BLOCK[match[2]]}.{_OLD.get(match[3], match[3])}"] = tensor
        elif match and match[2] in (*_FUSED, *_FUSED_OF_DISTILBERT):
            fused.setdefault(f"blocks.{int(match[1])}", {}).setdefault(match[2], {})[match[3]] = tensor
        else:
            raise BadInput(
                f"{where}: {name!r:.150} has no place in a {model_type} encoder; its blocks are of another kind"
            )
    for at, projections in fused.items():
        mapped |= {f"{at}.{key}": value for key, value in _joined(at, projections, where).items()}
    return mapped, beside
