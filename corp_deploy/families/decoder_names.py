"""Conversion of decoders' state dicts between transformers' names and the names of `decoder`, both ways.

`decoder` has one fused projection of q, k and v. GPT-2 has one too, and its linear layers are transposed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ground.errors import BadInput

from .decoder import DecoderArchitecture

_BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|attn\.(masked_)?bias|embeddings\.(position_ids|token_type_ids))")
_OLD = {"gamma": "weight", "beta": "bias"}  # the entries of a layer norm by their names in old files


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names that a model type of transformers gives to its tensors."""

    base: str  # the prefix of all names but the head's in the file of a whole model
    blocks: str  # the prefix of a block's number
    outside: Mapping[str, str]  # their names of layers outside of blocks, by ours
    parts: Mapping[str, str]  # their names of layers within a block, by ours
    fused: tuple[str, ...]  # their names of q, k and v; one name where they are one tensor
    transposed: bool = False  # whether weights of linear layers are [inputs, outputs]

    @property
    def ours_outside(self) -> dict[str, str]:
        """Our names of tensors outside of blocks, by theirs without `base`."""
        return {
            f"{theirs}.{entry}": f"{ours}.{entry}" for ours, theirs in self.outside.items() for entry in _OLD.values()
        }


_BLOCK = ("norm1", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")


def _parts(*theirs: str) -> dict[str, str]:
    return dict(zip(_BLOCK, theirs, strict=True))


_WORDS = {"embeddings.word": "embed_tokens", "head": "lm_head"}
_OPT = Names(
    base="model.decoder.",
    blocks="layers.",
    outside=_WORDS | {"embeddings.position": "embed_positions", "norm": "final_layer_norm"},
    parts=_parts("self_attn_layer_norm", "self_attn.out_proj", "final_layer_norm", "fc1", "fc2"),
    fused=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
)
_GPT2 = Names(
    base="transformer.",
    blocks="h.",
    outside={"embeddings.word": "wte", "embeddings.position": "wpe", "norm": "ln_f", "head": "lm_head"},
    parts=_parts("ln_1", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    fused=("attn.c_attn",),
    transposed=True,
)
_LLAMA = Names(
    base="model.",
    blocks="layers.",
    outside=_WORDS | {"norm": "norm"},
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
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
}
_LINEAR = ("attn.proj", "attn.qkv", "mlp.fc1", "mlp.fc2")


def _laid_out(names: Names, path: str, tensor: Tensor) -> Tensor:
    """Return a block's tensor, transposed if it is the matrix of a linear layer that transformers has as [in, out]."""
    return tensor.T if names.transposed and tensor.ndim == 2 and path in _LINEAR else tensor


def _qkv(names: Names, theirs: Mapping[str, dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    joined = {}
    for entry in ("weight", "bias"):
        tensors = [theirs[name][entry] for name in names.fused if entry in theirs.get(name, {})]
        if (tensors and len(tensors) < len(names.fused)) or (entry == "weight" and not tensors):
            raise BadInput(f"{where}: expected {', '.join(names.fused)} with a {entry} each")
        if len({each.shape[1:] for each in tensors}) > 1:
            raise BadInput(f"{where}: {', '.join(names.fused)} read different numbers of channels")
        if tensors:
            joined[f"attn.qkv.{entry}"] = torch.cat([_laid_out(names, "attn.qkv", each) for each in tensors])
    return joined


def block_from_transformers(
    state: Mapping[str, Tensor], model_type: str, *, where: str, decoder: DecoderArchitecture
) -> dict[str, Tensor]:
    """Return a block's tensors under our names within a block, with the frequencies of rotary planes.

    `state` has them by their names within a block. Raises BadInput for a tensor that our block does not have.
    """
    names = _NAMES[model_type]
    ours = {theirs: path for path, theirs in names.parts.items()}
    mapped, fused, foreign = dict[str, Tensor](), dict[str, dict[str, Tensor]](), list[str]()
    for name, tensor in state.items():
        theirs, _, kept = name.rpartition(".")
        entry = _OLD.get(kept, kept)
        if theirs in ours:
            mapped[f"{ours[theirs]}.{entry}"] = _laid_out(names, ours[theirs], tensor)
        elif theirs in names.fused:
            fused.setdefault(theirs, {})[entry] = tensor
        elif not _BUFFERS.fullmatch(name):
            foreign.append(name)
    _refuse_foreign(foreign, model_type, where)
    if decoder.rope is not None:
        mapped["attn.rotary.freqs_HP"] = decoder.rope.frequencies(decoder.head // 2).unsqueeze(0)
    return mapped | _qkv(names, fused, where)


def outside_from_transformers(
    state: Mapping[str, Tensor], model_type: str, *, where: str, tied: bool
) -> dict[str, Tensor]:
    """Return the tensors outside of blocks under our names, without a head that is `tied` to the embeddings.

    Raises BadInput for a tensor that our decoder does not have.
    """
    ours, mapped, foreign = _NAMES[model_type].ours_outside, dict[str, Tensor](), list[str]()
    for name, tensor in state.items():
        path, _, entry = name.rpartition(".")
        known = ours.get(f"{path}.{_OLD.get(entry, entry)}")
        if known is not None and not (tied and known == "head.weight"):
            mapped[known] = tensor
        elif known is None and not _BUFFERS.fullmatch(name):
            foreign.append(name)
    _refuse_foreign(foreign, model_type, where)
    return mapped


def names_by_block(
    state: Iterable[str], model_type: str, *, where: str
) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """Return a file's tensor names outside of blocks, and those of each block by number, by names without prefix."""
    names, outside, blocks = _NAMES[model_type], dict[str, str](), dict[int, dict[str, str]]()
    block = re.compile(re.escape(names.blocks) + r"(\d{1,4})\.(.+)")
    for name in state:
        own = name.removeprefix(names.base)
        own = own if own != name else name.removeprefix(names.base.rpartition(".")[0].rpartition(".")[2] + ".")
        match = block.fullmatch(own)
        place, key = (blocks.setdefault(int(match[1]), {}), match[2]) if match else (outside, own)
        if key in place:
            raise BadInput(f"{where}: {own!r:.150} is there with and without {names.base!r}; save one of the two")
        place[key] = name
    return outside, blocks


def _refuse_foreign(foreign: list[str], model_type: str, where: str) -> None:
    if foreign:
        raise BadInput(
            f"{where}: {min(foreign)!r:.150} has no place in a {model_type} decoder: none built here has such a tensor"
        )


def state_from_transformers(
    state: Mapping[str, Tensor], model_type: str, *, where: str, decoder: DecoderArchitecture
) -> dict[str, Tensor]:
    """Return a state dict under our names. Raises BadInput for a tensor that our decoder does not have."""
    outside, blocks = names_by_block(state, model_type, where=where)
    own = {name: state[full] for name, full in outside.items()}
    mapped = outside_from_transformers(own, model_type, where=where, tied=decoder.tied)
    for index, names in sorted(blocks.items()):
        within = {name: state[full] for name, full in names.items()}
        block = block_from_transformers(within, model_type, where=f"{where}: block {index}", decoder=decoder)
        mapped |= {f"blocks.{index}.{name}": tensor for name, tensor in block.items()}
    return mapped


def state_to_transformers(
    state: Mapping[str, Tensor], rows: tuple[int, int, int], model_type: str
) -> dict[str, Tensor]:
    """Return a state dict under transformers' names; `rows` are the numbers of rows of q, k and v in `attn.qkv`."""
    names, named = _NAMES[model_type], dict[str, Tensor]()
    theirs = {ours: name for name, ours in names.ours_outside.items()}
    for name, tensor in state.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(\w+)", name)
        if match is None:
            named[f"{'' if name == 'head.weight' else names.base}{theirs[name]}"] = tensor
            continue
        at, path, entry = f"{names.base}{names.blocks}{match[1]}", match[2], match[3]
        if path == "attn.qkv":
            parts = tensor.split(rows) if len(names.fused) > 1 else (tensor,)
            for fused, part in zip(names.fused, parts, strict=True):
                named[f"{at}.{fused}.{entry}"] = _laid_out(names, path, part)
        elif path != "attn.rotary":
            named[f"{at}.{names.parts[path]}.{entry}"] = _laid_out(names, path, tensor)
    return named
