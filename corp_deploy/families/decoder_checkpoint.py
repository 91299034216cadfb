"""Decoders' tensors under transformers' names and under those here, both ways.

GPT-2 keeps its linear layers transposed, and its q, k and v fused.
"""

from collections.abc import Mapping

from torch import Tensor

from .text_decoder import DecoderArchitecture
from .transformers_names import Names, block_from, by_block, outside_from, refuse_foreign, state_to

_HEAD = "lm_head.weight"


def _outside(word: str, last_norm: str, position: str = "") -> dict[str, str]:
    """Ours by theirs."""
    norms = {f"{last_norm}.{entry}": f"norm.{entry}" for entry in ("weight", "bias")}
    positions = {f"{position}.weight": "embeddings.position.weight"} if position else {}
    return {f"{word}.weight": "embeddings.word.weight", _HEAD: "head.weight"} | norms | positions


_OPT = Names(
    base="model.decoder.",
    blocks="layers.",
    outside=_outside("embed_tokens", "final_layer_norm", "embed_positions"),
    parts={
        "norm1": "self_attn_layer_norm",
        "attn.proj": "self_attn.out_proj",
        "norm2": "final_layer_norm",
        "mlp.fc1": "fc1",
        "mlp.fc2": "fc2",
    },
    fused=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
)
_GPT2 = Names(
    base="transformer.",
    blocks="h.",
    outside=_outside("wte", "ln_f", "wpe"),
    parts={
        "norm1": "ln_1",
        "attn.proj": "attn.c_proj",
        "norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    },
    fused=("attn.c_attn",),
    transposed=True,
)
_LLAMA = Names(
    base="model.",
    blocks="layers.",
    outside=_outside("embed_tokens", "norm"),
    parts={
        "norm1": "input_layernorm",
        "attn.proj": "self_attn.o_proj",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "norm2": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    fused=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
)
NAMES: Mapping[str, Names] = {"opt": _OPT, "gpt2": _GPT2} | dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3"), _LLAMA
)


def block_from_transformers(
    state: Mapping[str, Tensor], architecture: DecoderArchitecture, model_type: str, *, where: str
) -> dict[str, Tensor]:
    """A block's tensors, by their names within it, under those here, with what no file has: how fast planes turn.
    Raises BadInput for a tensor that has no place here.
    """
    mapped = block_from(state, NAMES[model_type], f"{model_type} decoder", where=where)
    if architecture.rope is not None:
        mapped["attn.rotary.freqs_HP"] = architecture.rope.frequencies(architecture.head // 2).unsqueeze(0)
    return mapped


def outside_from_transformers(
    state: Mapping[str, Tensor], architecture: DecoderArchitecture, model_type: str, *, where: str
) -> dict[str, Tensor]:
    """Tensors of no block under those names here; a head that is tied has no own. Raises BadInput as above."""
    mapped, foreign = outside_from(state, NAMES[model_type])
    refuse_foreign(foreign, f"{model_type} decoder", where=where)
    if architecture.tied:
        mapped.pop("head.weight", None)
    return mapped


def state_from_transformers(
    state: Mapping[str, Tensor], architecture: DecoderArchitecture, *, model_type: str, where: str
) -> dict[str, Tensor]:
    """A state dict under this model's names. Raises BadInput for a tensor that has no place here."""
    outside, blocks = by_block(state, NAMES[model_type], where=where)
    own_outside = {own: state[name] for own, name in outside.items()}
    mapped = outside_from_transformers(own_outside, architecture, model_type, where=where)
    for index, names in sorted(blocks.items()):
        own = {within: state[name] for within, name in names.items()}
        block = block_from_transformers(own, architecture, model_type, where=f"{where}: block {index}")
        mapped |= {f"blocks.{index}.{name}": tensor for name, tensor in block.items()}
    return mapped


def state_to_transformers(
    state: Mapping[str, Tensor], rows: tuple[int, int, int], layers: int, *, model_type: str
) -> dict[str, Tensor]:
    """A state dict of a whole model under transformers' names; `rows` of each block's fused projection are q's, k's and
    v's.
    """
    names = NAMES[model_type]
    named = state_to({name: each for name, each in state.items() if ".rotary." not in name}, names, rows, layers)
    return {name if name == _HEAD else f"{names.base}{name}": tensor for name, tensor in named.items()}
