"""Decoders' tensors under transformers' names and under those here, both ways.

A name is of the embeddings, of a block or of the end; q, k and v are one fused projection here. GPT-2 keeps its linear
layers transposed, and its q, k and v fused as well.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ground.errors import BadInput

from .text_decoder import DecoderArchitecture

_BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|attn\.(masked_)?bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How a kind of decoder calls its tensors. `blocks`: what stands before a block's number; `base`: what stands
    before everything but the head in a whole model's file; `parts`: within a block, theirs by ours; `fused`: of q, k
    and v, one name where they are one tensor. `transposed`: linear layers are [inputs, outputs].
    """

    base: str
    blocks: str
    word: str
    last_norm: str
    parts: Mapping[str, str]
    fused: tuple[str, ...]
    position: str = ""
    head: str = "lm_head"
    transposed: bool = False

    def of_block(self, index: int) -> str:
        """What stands before the names of a block's own."""
        return f"{self.base}{self.blocks}{index}."


_OPT = Names(
    base="model.decoder.",
    blocks="layers.",
    word="embed_tokens",
    position="embed_positions",
    last_norm="final_layer_norm",
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
    word="wte",
    position="wpe",
    last_norm="ln_f",
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
    word="embed_tokens",
    last_norm="norm",
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
_NAMES: Mapping[str, Names] = {
    "opt": _OPT,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}
_LINEAR = ("attn.proj", "attn.qkv", "mlp.fc1", "mlp.fc2")


def _laid_out(names: Names, path: str, tensor: Tensor) -> Tensor:
    """A tensor of a block as the other side keeps it."""
    return tensor.T if names.transposed and tensor.ndim == 2 and path in _LINEAR else tensor


def _qkv(names: Names, at: str, theirs: Mapping[str, dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """The fused projection of a block, weight and perhaps bias."""
    joined = {}
    for entry in ("weight", "bias"):
        tensors = [theirs[name][entry] for name in names.fused if entry in theirs.get(name, {})]
        if (tensors and len(tensors) < len(names.fused)) or (entry == "weight" and not tensors):
            raise BadInput(f"{where}: {at}: expected {', '.join(names.fused)} with a {entry} each")
        if len({each.shape[1:] for each in tensors}) > 1:
            raise BadInput(f"{where}: {at}: {', '.join(names.fused)} read other numbers of channels")
        if tensors:
            joined[f"attn.qkv.{entry}"] = torch.cat([_laid_out(names, "attn.qkv", each) for each in tensors])
    return joined


def block_from_transformers(
    state: Mapping[str, Tensor], architecture: DecoderArchitecture, model_type: str, *, where: str
) -> dict[str, Tensor]:
    """A block's tensors, by their names within it, under those here, with what no file has: how fast planes turn.
    Raises BadInput for a tensor that has no place here.
    """
    names = _NAMES[model_type]
    ours = {theirs: path for path, theirs in names.parts.items()}
    mapped, fused, foreign = dict[str, Tensor](), dict[str, dict[str, Tensor]](), list[str]()
    for name, tensor in state.items():
        theirs, _, entry = name.rpartition(".")
        if theirs in ours:
            mapped[f"{ours[theirs]}.{entry}"] = _laid_out(names, ours[theirs], tensor)
        elif theirs in names.fused:
            fused.setdefault(theirs, {})[entry] = tensor
        elif not _BUFFERS.fullmatch(name):
            foreign.append(name)
    refuse_foreign(foreign, model_type, where=where)
    if architecture.rope is not None:
        mapped["attn.rotary.freqs_HP"] = architecture.rope.frequencies(architecture.head // 2).unsqueeze(0)
    return mapped | _qkv(names, where, fused, where)


def outside_names(model_type: str) -> dict[str, str]:
    """Of what stands in no block: ours by theirs, without what stands before a whole model's names."""
    names = _NAMES[model_type]
    outside = {f"{names.word}.weight": "embeddings.word.weight", f"{names.head}.weight": "head.weight"}
    outside |= {f"{names.last_norm}.{entry}": f"norm.{entry}" for entry in ("weight", "bias")}
    if names.position:
        outside[f"{names.position}.weight"] = "embeddings.position.weight"
    return outside


def outside_from_transformers(
    state: Mapping[str, Tensor], architecture: DecoderArchitecture, model_type: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of no block under those names here, and names that have no place; a head that is tied has no own."""
    ours = outside_names(model_type)
    mapped = {ours[name]: tensor for name, tensor in state.items() if name in ours}
    if architecture.tied:
        mapped.pop("head.weight", None)
    return mapped, [name for name in state if name not in ours and not _BUFFERS.fullmatch(name)]


def names_by_block(
    state: Iterable[str], model_type: str, *, where: str
) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """Names in a file by what they are called outside of all blocks, and by block within it."""
    outside, blocks = dict[str, str](), dict[int, dict[str, str]]()
    for name, index, own in _parted(state, _NAMES[model_type], where):
        (outside if index is None else blocks.setdefault(index, {}))[own] = name
    return outside, blocks


def _parted(state: Iterable[str], names: Names, where: str) -> Iterator[tuple[str, int | None, str]]:
    """Every name with its block, None for one outside of all, and what it is called there."""
    block = re.compile(re.escape(names.blocks) + r"(\d{1,4})\.(.+)")
    used_names = set[str]()
    for name in state:
        own = name.removeprefix(names.base)
        own = own if own != name else name.removeprefix(names.base.rpartition(".")[0].rpartition(".")[2] + ".")
        if own in used_names:
            raise BadInput(f"{where}: {own!r:.150} is there with and without {names.base!r}; save one of the two")
        used_names.add(own)
        match = block.fullmatch(own)
        yield (name, int(match[1]), match[2]) if match else (name, None, own)


def refuse_foreign(foreign: Iterable[str], model_type: str, *, where: str) -> None:
    """Raise BadInput, naming the first one, where a tensor has no place here."""
    for name in sorted(foreign):
        raise BadInput(f"{where}: {name!r:.150} has no place in a {model_type} decoder: its blocks are of another kind")


def state_from_transformers(
    state: Mapping[str, Tensor], architecture: DecoderArchitecture, *, model_type: str, where: str
) -> dict[str, Tensor]:
    """A state dict under this model's names. Raises BadInput for a tensor that has no place here."""
    outside, blocks = names_by_block(state, model_type, where=where)
    own_outside = {own: state[name] for own, name in outside.items()}
    mapped, foreign = outside_from_transformers(own_outside, architecture, model_type)
    for index, names in sorted(blocks.items()):
        own = {within: state[name] for within, name in names.items()}
        block = block_from_transformers(own, architecture, model_type, where=f"{where}: block {index}")
        mapped |= {f"blocks.{index}.{name}": tensor for name, tensor in block.items()}
    refuse_foreign(foreign, model_type, where=where)
    return mapped


def _block_to_transformers(
    block: Mapping[str, Tensor], rows: tuple[int, int, int], names: Names
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in block.items():
        path, _, entry = name.rpartition(".")
        if path == "attn.qkv":
            parts = tensor.split(rows) if len(names.fused) > 1 else (tensor,)
            for theirs, part in zip(names.fused, parts, strict=True):
                yield f"{theirs}.{entry}", _laid_out(names, path, part)
        elif path != "attn.rotary":
            yield f"{names.parts[path]}.{entry}", _laid_out(names, path, tensor)


def state_to_transformers(
    state: Mapping[str, Tensor], rows: tuple[int, int, int], layers: int, *, model_type: str
) -> dict[str, Tensor]:
    """A state dict of a whole model under transformers' names; `rows` of each block's fused projection are q's, k's and
    v's.
    """
    names = _NAMES[model_type]
    theirs = {ours: name for name, ours in outside_names(model_type).items() if ours != "head.weight"}
    named = {f"{names.base}{theirs[name]}": tensor for name, tensor in state.items() if name in theirs}
    for index in range(layers):
        at = f"blocks.{index}."
        block = {name.removeprefix(at): tensor for name, tensor in state.items() if name.startswith(at)}
        named |= {
            f"{names.of_block(index)}{name}": tensor for name, tensor in _block_to_transformers(block, rows, names)
        }
    if "head.weight" in state:
        named[f"{names.head}.weight"] = state["head.weight"]
    return named
