"""Tensors under transformers' names and under those here, both ways, of models whose blocks are alike.

A name is of a block or of none; q, k and v are one fused projection here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ground.errors import BadInput

_BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|\battn\.(masked_)?bias)|embeddings\.(position|token_type)_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How a kind of model calls its tensors. `blocks`: what stands before a block's number; `base`: what stands before
    everything but the head in a whole model's file; `outside`: ours by theirs, of what is in no block; `parts`: within
    a block, theirs by ours; `fused`: of q, k and v, one name where they are one tensor. `transposed`: linear layers are
    [inputs, outputs].
    """

    base: str
    blocks: str
    outside: Mapping[str, str]
    parts: Mapping[str, str]
    fused: tuple[str, ...]
    transposed: bool = False


_LINEAR = ("attn.proj", "attn.qkv", "mlp.fc1", "mlp.fc2")


def _laid_out(names: Names, path: str, tensor: Tensor) -> Tensor:
    """A tensor of a block as the other side keeps it."""
    return tensor.T if names.transposed and tensor.ndim == 2 and path in _LINEAR else tensor


def _qkv(names: Names, theirs: Mapping[str, dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """The fused projection of a block, weight and perhaps bias."""
    joined = {}
    for entry in ("weight", "bias"):
        tensors = [theirs[name][entry] for name in names.fused if entry in theirs.get(name, {})]
        if (tensors and len(tensors) < len(names.fused)) or (entry == "weight" and not tensors):
            raise BadInput(f"{where}: expected {', '.join(names.fused)} with a {entry} each")
        if len({each.shape[1:] for each in tensors}) > 1:
            raise BadInput(f"{where}: {', '.join(names.fused)} read other numbers of channels")
        if tensors:
            joined[f"attn.qkv.{entry}"] = torch.cat([_laid_out(names, "attn.qkv", each) for each in tensors])
    return joined


def block_from(state: Mapping[str, Tensor], names: Names, what: str, *, where: str) -> dict[str, Tensor]:
    """A block's tensors, by their names within it, under those here. Raises BadInput for one that has no place in
    `what` the model is.
    """
    ours = {theirs: path for path, theirs in names.parts.items()}
    mapped, fused, foreign = dict[str, Tensor](), dict[str, dict[str, Tensor]](), list[str]()
    for name, tensor in state.items():
        theirs, _, entry = name.rpartition(".")
        if theirs in ours:
            mapped[f"{ours[theirs]}.{entry}"] = _laid_out(names, ours[theirs], tensor)
        elif theirs in names.fused:
            fused.setdefault(theirs, {})[entry] = tensor
        else:
            foreign.append(name)
    refuse_foreign(foreign, what, where=where)
    return mapped | _qkv(names, fused, where)


def outside_from(state: Mapping[str, Tensor], names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of no block under their names here, and names that have none."""
    mapped = {names.outside[name]: tensor for name, tensor in state.items() if name in names.outside}
    return mapped, [name for name in state if name not in names.outside]


def by_block(state: Iterable[str], names: Names, *, where: str) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """Names in a file by what they are called outside of all blocks, and by block within it; of no buffers."""
    outside, blocks, used_names = dict[str, str](), dict[int, dict[str, str]](), set[str]()
    block = re.compile(re.escape(names.blocks) + r"(\d{1,4})\.(.+)")
    for name in state:
        own = name.removeprefix(names.base)
        own = own if own != name else name.removeprefix(names.base.rpartition(".")[0].rpartition(".")[2] + ".")
        if own in used_names:
            raise BadInput(f"{where}: {own!r:.150} is there with and without {names.base!r}; save one of the two")
        used_names.add(own)
        match = block.fullmatch(own)
        if not _BUFFERS.fullmatch(match[2] if match else own):
            (blocks.setdefault(int(match[1]), {}) if match else outside)[match[2] if match else own] = name
    return outside, blocks


def refuse_foreign(foreign: Iterable[str], what: str, *, where: str) -> None:
    """Raise BadInput, naming the first one, where a tensor has no place here."""
    for name in sorted(foreign):
        raise BadInput(f"{where}: {name!r:.150} has no place in a {what}: its blocks are of another kind")


def _block_to(block: Mapping[str, Tensor], rows: tuple[int, ...], names: Names) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in block.items():
        path, _, entry = name.rpartition(".")
        if path == "attn.qkv":
            parts = tensor.split(rows) if len(names.fused) > 1 else (tensor,)
            for theirs, part in zip(names.fused, parts, strict=True):
                yield f"{theirs}.{entry}", _laid_out(names, path, part)
        else:
            yield f"{names.parts[path]}.{entry}", _laid_out(names, path, tensor)


def state_to(state: Mapping[str, Tensor], names: Names, rows: tuple[int, int, int], layers: int) -> dict[str, Tensor]:
    """A state dict under transformers' names without their `base`; `rows` of each block's fused projection are q's,
    k's and v's.
    """
    theirs = {ours: name for name, ours in names.outside.items()}
    named = {theirs[name]: tensor for name, tensor in state.items() if name in theirs}
    for index in range(layers):
        at = f"blocks.{index}."
        block = {name.removeprefix(at): tensor for name, tensor in state.items() if name.startswith(at)}
        named |= {f"{names.blocks}{index}.{name}": tensor for name, tensor in _block_to(block, rows, names)}
    return named
