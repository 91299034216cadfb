"""What a program has computed of timm's attentions, of what version 0.1 kept of them: what is added to scores by where
tokens stand, of tables or networks, what scores of cosines are scaled by, and how positions turn queries and keys.

Legend: H heads, N tokens, T places that one can have as seen from another.
"""

import math
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

State = Mapping[str, Tensor]
_MASK, _SCALE = ".attn_mask_folded", ".logit_scale"
_OF_TURNS = re.compile(r"rope\.\w+_folded(?:_(\d+))?")
"""Sines and cosines of queries, then of keys, block after block."""
_OF_PLACES = re.compile(r"(?P<owner>.*)\.relative_position_(bias_table|index)_folded(_(?P<number>\d+))?")


def constant(name: str, shape: torch.Size, buffers: State, state: State) -> Tensor | None:
    """A constant of a program, of this shape; None for any other. `buffers`: those of timm's model, in no file."""
    if name.endswith(_MASK):
        return buffers[name.removesuffix("_folded")].view(shape)
    if rope_match := _OF_TURNS.fullmatch(name):
        return _turns(int(rope_match[1] or 0), shape, state)
    of_places, inside = _OF_PLACES.fullmatch(name), re.match(r".*\.attn(?=\.)", name)
    if not (of_places or inside):
        return None
    # Where one table is of all blocks, each has its sum with the block's own.
    attention = inside[0] if inside else f"blocks.{_block(of_places, state)}.attn"
    if 0 in state.get(f"{attention}.qkv.weight", torch.ones(1)).shape:  # its output projection's bias alone is left
        return torch.zeros(shape)
    if name.endswith(_SCALE):
        return state[f"{attention}.q_norm{_SCALE}"].clamp(max=math.log(100.0)).exp()
    if of_places is None:
        return None
    bias, owner = f"{attention}.position_bias", of_places["owner"]
    table_TH = state.get(f"{bias}.table")
    if table_TH is None:
        table_TH = _of_network(bias, buffers[f"{owner}.relative_coords_table"], state)
    place_NN = _places(buffers[f"{owner}.relative_position_index"], shape[-1], len(table_TH))
    return table_TH[place_NN].permute(2, 0, 1).reshape(shape)


def _turns(number: int, shape: torch.Size, state: State) -> Tensor | None:
    """[H,T,D] of heads that keep planes of their own, else [T,D] of all; of patches, which are the last tokens."""
    block, part = number // 4, number % 2
    table_HND = state.get(f"blocks.{block}.attn.rotary.{part}")
    if table_HND is None:
        return torch.zeros(shape) if 0 in state.get(f"blocks.{block}.attn.qkv.weight", torch.ones(1)).shape else None
    own = table_HND[:, -shape[-2] :]
    return (own if own.numel() == shape.numel() else own[:1]).reshape(shape)


def _block(of_places: re.Match[str] | None, state: State) -> str:
    """Whose sum a constant has of those that stand outside of blocks: in turn, or one that is of all, any block's."""
    number = (of_places and of_places["number"]) or "0"
    having = [name.split(".")[1] for name in state if name.endswith(".position_bias.table")]
    return number if number in having or not having else having[0]


def shared(names: Iterable[str], state: State) -> list[str]:
    """The one constant of all blocks, where these have different ones, as each had heads of its own taken away."""
    of_all = [name for name in names if _OF_PLACES.fullmatch(name) and ".attn." not in name]
    tables = [each for name, each in state.items() if name.endswith(".position_bias.table")]
    return of_all if len(of_all) == 1 and not all(torch.equal(each, tables[0]) for each in tables) else []


def _places(index: Tensor, tokens: int, places: int) -> Tensor:
    """The place of each token as seen from each other; of tokens that timm knows none of, in front, the last one."""
    patches = round(index.numel() ** 0.5)
    place_NN = index.new_full((tokens, tokens), places - 1)
    place_NN[tokens - patches :, tokens - patches :] = index.view(patches, patches)
    return place_NN


def _of_network(bias: str, coordinates: Tensor, state: State) -> Tensor:
    """16 sigmoid(g(x, y)) of each place [T,H] (Swin V2, arXiv 2111.09883, section 3.3)."""
    first, offset, last = (state[f"{bias}.cpb_mlp.{each}"] for each in ("0.weight", "0.bias", "2.weight"))
    return 16.0 * F.linear(F.linear(coordinates.view(-1, 2), first, offset).relu(), last).sigmoid()
