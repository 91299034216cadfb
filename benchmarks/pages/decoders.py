"""Which decoders go through, asked of the code that reads, saves and builds them."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table
from corp_deploy.families.decoder_builder import CLASSES
from corp_deploy.families.decoder_config import MODEL_TYPES, architecture_from_transformers
from corp_deploy.families.decoder_model import DecoderArchitecture
from corp_deploy.families.decoder_names import hidden_entry
from corp_deploy.families.decoder_saved import refuse_unsayable
from ground.errors import BadInput

NAMES = {"opt": "OPT", "gpt2": "GPT-2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SMALL = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 8, "ffn_dim": 64},
    **{"n_embd": 32, "n_inner": 64, "n_head": 4, "n_layer": 1, "n_positions": 8},
}
"""The entries of all of them; each reads its own."""


def _queries(decoder: DecoderArchitecture) -> str:
    if decoder.qk_norm:
        return "kept: a norm of each query and key"
    return "planes that positions turn" if decoder.rope else "dimensions"


def _saved(config: Mapping[str, Any], decoder: DecoderArchitecture) -> str:
    """What a plain directory of the class can say."""
    entry = f"`{hidden_entry(str(config['model_type']))}`"
    try:
        refuse_unsayable(config, {"blocks.0.attn.v": decoder.groups // 2 * decoder.head})
    except BadInput:
        return entry
    return f"{entry}, fewer groups"


def _row(kind: str, name: str) -> list[str]:
    config = SMALL | {"model_type": kind}
    decoder = architecture_from_transformers(config, where="support.md")
    whole = "groups of heads" if decoder.groups < decoder.heads else "heads"
    mlp = "gated" if decoder.gated else "plain"
    graph = "yes" if kind in CLASSES else "of a prompt alone"
    return [f"{name} (`{kind}`)", mlp, whole, _queries(decoder), _saved(config, decoder), graph]


def decoders() -> str:
    """A line an architecture."""
    assert set(NAMES) == set(MODEL_TYPES), MODEL_TYPES
    head = ["decoder", "MLP", "removed whole", "queries and keys", "`--save-as hf` says", "graph with a cache"]
    return table(head, [_row(kind, name) for kind, name in NAMES.items()])
