"""timm's models of families that version 0.1 had (hierarchies: timm_eva_legacy.py), and decoders: widths of sites and
heads without a program, norms of convolutional networks taken into the weights in front. They become programs whose
norms are the identity. What a program has computed is made of what that version kept: what is added to scores by where
tokens stand, of tables or networks, what scores of cosines are scaled by, how positions turn queries and keys, and how
fast the planes of a decoder turn that each head keeps.

Legend: O outputs and I inputs of a layer; H heads or 1 for all, N tokens, T places that one can have as seen from
another, P planes of a dense head, K of them that are left.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.spec.architecture import Architecture
from corp_deploy.traced.finding.site import Index, Site
from corp_deploy.traced.models.module import TracedModule
from corp_deploy.traced.models.narrowing import first_groups, with_groups
from corp_deploy.traced.models.offered import names_of
from ground.errors import BadInput

from .decoder import arguments_of
from .decoder_model import DecoderArchitecture
from .head_attention import SequenceRotary
from .traced_model import tracing

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
    if table_TH is None:  # 16 sigmoid(g(x, y)) of each place (Swin V2, arXiv 2111.09883, section 3.3)
        first, offset, last = (state[f"{bias}.cpb_mlp.{each}"] for each in ("0.weight", "0.bias", "2.weight"))
        hidden = F.linear(buffers[f"{owner}.relative_coords_table"].view(-1, 2), first, offset).relu()
        table_TH = 16.0 * F.linear(hidden, last).sigmoid()
    # Each token as seen from each other; of tokens that timm knows none of, in front, the last place.
    index, tokens = buffers[f"{owner}.relative_position_index"], shape[-1]
    patches = round(index.numel() ** 0.5)
    place_NN = index.new_full((tokens, tokens), len(table_TH) - 1)
    place_NN[tokens - patches :, tokens - patches :] = index.view(patches, patches)
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


_ALIASES = (
    (r"_folded$", ""),
    (r"\.mean_weight_\d+$", ".mean.weight"),
    (r"\.(?:fc1|conv_reduce)\.(\w+)$", r".reduce.\1"),
    (r"\.(?:fc2|conv_expand)\.(\w+)$", r".expand.\1"),
    (r"\.conv\.(\w+)$", r".\1"),
    (r"(\d+)\.conv\.(\w+)$", r"\1_conv.\2"),
    (r"\.ls(\d)\.gamma$", r".gamma_\1"),
    (r"\.q_bias$", ".qkv.bias"),
    (r"\.proj_l\.(\w+)$", r".talk.before.\1"),
    (r"\.proj_w\.(\w+)$", r".talk.behind.\1"),
)
"""What a program's weight was called then, where it was not as it is called now."""
_PARTS = frozenset(("qk", "v"))
"""Of an attention's sites, behind its name."""
_OF_IDENTITY = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0}


def is_of_widths(sites: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether config.json's sites are of that version."""
    return any("groups" not in entry for entry in sites.values())


def as_program(
    model: TracedModule,
    sites: Mapping[str, Mapping[str, Any]],
    state: State,
    built: Callable[[], nn.Module],
    *,
    where: str,
    known_groups: Mapping[str, Index] = MappingProxyType({}),
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The dense model narrowed to the widths of these sites and weights, and the weights by its program's names;
    `built`: timm's, for tables that no file has; `known_groups`: of some sites the groups that are left. Raises
    BadInput for weights of no widths that it can have.
    """
    own, kept = tracing(model), dict(known_groups)
    for name, site in names_of(own).items():
        path, _, part = name.rpartition(".")
        is_of_attention = part in _PARTS and path in sites
        if is_of_attention:
            require_widths(path, sites[path], where)
        if name not in known_groups and is_of_attention:
            # The first groups, as many as there were, by its entry: one layer has all of its rows.
            heads, width = sites[path]["heads"], sites[path][part]
            kept[name] = first_groups(site, heads * max(width, 1), parts=heads)  # of a constant what is all zero
        elif name not in known_groups:
            kept[name] = first_groups(site, _width(site, model, state))
    biases = tuple(name for name in own.added if _found(name, state) is not None)
    new, unreduced = with_groups(model, kept, biases)
    if unreduced:
        raise BadInput(
            f"{where}: {next(iter(unreduced.values()))}; the file was edited or damaged, write the model again"
        )
    buffers = dict(built().named_buffers()) if any("relative_position" in name for name in new.state_dict()) else {}
    weights = {name: _weight(name, each, model, state, buffers) for name, each in new.state_dict().items()}
    if lost := [name for name, each in weights.items() if each is None] + shared(weights, state):
        raise BadInput(
            f"{where}: version 0.1 wrote it by a family of its own, and its weights don't tell {lost[0]} of the "
            "model's program; reduce the dense model again"
        )
    return new, {name: each for name, each in weights.items() if each is not None}


def require_widths(name: str, entry: Mapping[str, Any], where: str) -> None:
    """Raise BadInput for an attention's entry that is another site's."""
    if not {*_PARTS, "heads"} <= entry.keys():
        raise BadInput(f"{where}: {name!r} has no heads, qk and v; the file was edited, write the model again")


def _found(name: str, state: State) -> Tensor | None:
    name = re.sub(*_ALIASES[0], name)
    names = (name, *(re.sub(pattern, new, name) for pattern, new in _ALIASES[1:]))
    return next((state[each] for each in names if each in state), None)


def _width(site: Site, model: nn.Module, state: State) -> int:
    """What is left of a site in the layers that write or read it, and at least one group of each part: a constant
    alone is left of channels that are all zero.
    """
    program = tracing(model).program
    for span in (*site.writers, *site.readers):
        there, dense = _found(span.name, state), program.tensor(span.name)
        if there is not None and there.dim() > 1:
            axis = span.axes[0]
            return max(round(site.size * there.shape[axis] / dense.shape[axis]), site.parts)
    return site.size


def _weight(name: str, empty: Tensor, model: nn.Module, state: State, buffers: State) -> Tensor | None:
    """A weight of that state, or computed of it, or of a norm or a gain that was taken into others, or the model's own
    where that has some; None else.
    """
    there = _found(name, state)
    if there is not None:
        if name.endswith("_folded") and not empty.is_meta:
            return empty  # made of weights of the dense model, which it has
        if there.numel() == empty.numel():
            return there.reshape(empty.shape)
        return there if 0 not in there.shape else there.new_zeros(empty.shape)  # of channels of which nothing was left
    if (computed := constant(name, empty.shape, buffers, state)) is not None:
        return computed
    path, _, leaf = name.removesuffix("_folded").rpartition(".")
    norm = model.get_submodule(path) if path in dict(model.named_modules()) else model
    if isinstance(norm, nn.BatchNorm2d):
        return torch.full(empty.shape, _OF_IDENTITY.get(leaf, 1.0 - norm.eps), dtype=torch.float32)
    return torch.ones(empty.shape) if leaf == "gamma" else None if empty.is_meta else empty


Entries = Mapping[str, Mapping[str, Any]]
_TURNING = "rotary.freqs_HP"


def as_decoders(
    model: TracedModule, architecture: Architecture, sites: Entries, state: State, *, where: str
) -> tuple[State, Mapping[str, Index]]:
    """Weights by the program's names, and what is left of attentions."""
    arguments, groups, kept = arguments_of(architecture), names_of(tracing(model)), dict[str, Index]()
    ours = dict(state)
    for index in range(arguments.decoder.layers):
        name = f"blocks.{index}.attn"
        if name not in sites:
            raise BadInput(f"{where}: no entry {name!r}; the file was edited or cut off, write the model again")
        require_widths(name, sites[name], where)
        turning_HK = ours.pop(f"{name}.{_TURNING}", None)
        kept |= _kept_of_decoder(name, sites[name], arguments.decoder, groups, turning_HK)
        if turning_HK is not None:
            # As the program folds sines and cosines: one row where all heads keep the same planes.
            own_HK = turning_HK[:1] if bool((turning_HK == turning_HK[:1]).all()) else turning_HK
            names = (f"{name}.{_TURNING}", f"{name}.{_TURNING}_folded_1")
            ours |= zip(names, SequenceRotary(own_HK).tables(arguments.text.length), strict=True)
    return ours, kept


def _kept_of_decoder(
    name: str, entry: Mapping[str, Any], dense: DecoderArchitecture, groups: Mapping[str, Site], freqs_HK: Tensor | None
) -> Iterator[tuple[str, Index]]:
    """The first heads and, but for planes, the first dimensions; of a constant what is all zero."""
    shared = dense.heads // dense.groups
    left = entry["heads"] // shared
    yield f"{name}.v", first_groups(groups[f"{name}.v"], left * max(entry["v"], 1), parts=left)
    queries = groups.get(f"{name}.qk")
    if queries is None:
        return
    if dense.rope is None or freqs_HK is None:
        yield f"{name}.qk", first_groups(queries, left * max(entry["qk"], 1), parts=left)
        return
    of_group_HK = freqs_HK.expand(entry["heads"], -1)[::shared]
    away_HKP = (of_group_HK.unsqueeze(-1) - dense.rope.frequencies(dense.head // 2)).abs()
    by_group_HP = torch.arange(queries.size).view(dense.groups, -1)[:left]
    yield f"{name}.qk", by_group_HP.gather(1, away_HKP.argmin(-1)).flatten().numpy()
