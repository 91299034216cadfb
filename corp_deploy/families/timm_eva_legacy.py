"""timm's Eva (EVA, EVA-02, DINOv3, rotary ViTs) and MaxViT, CoAtNet, TinyViT, EfficientFormer and Hiera as version 0.1
wrote them. They go back to timm's names and order.

Of Eva one layer was for queries, keys and values, whose planes are dimensions p and K + p of a head, beside tables of
how each turns; of the others the layers of blocks were moved to rows of parts over tokens.

Legend: H heads, N tokens, T patches, which are the last of them, or places of a table, P planes of a dense head, K that
are left, R rows.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from timm.layers import AttentionRope, RelPosBias, RelPosMlp
from timm.models.efficientformer import Attention, EfficientFormer
from timm.models.efficientformer_v2 import EfficientFormerV2
from timm.models.eva import Eva, EvaAttention
from timm.models.hiera import Hiera
from timm.models.maxxvit import Attention2d, AttentionCl, MaxxVit
from timm.models.tiny_vit import Attention as AttentionOfTinyVit
from timm.models.tiny_vit import TinyVit
from torch import Tensor, nn
from torch.nn import functional

from corp_deploy.traced.finding.site import Index
from corp_deploy.traced.models.module import TracedModule, traced_state
from corp_deploy.traced.models.pairs import TracedPairs
from ground.errors import BadInput

from .timm_legacy import require_widths
from .traced_model import sites_of

State = Mapping[str, Tensor]
Entries = Mapping[str, Mapping[str, Any]]
_EVERYWHERE = ((r"\.(?:maps|before)\.inner\.", "."), (r"\.inner\.", "."), (r"\.both\.", "."))
_MOVED: Mapping[type[nn.Module], tuple[tuple[str, str], ...]] = {
    EfficientFormer: (),
    EfficientFormerV2: ((r"\.mlp\.between\.conv\.", ".mlp.mid.conv."), (r"\.mlp\.(fc[12])\.", r".mlp.\1.conv.")),
    Hiera: ((r"\.shortcut\.proj\.", ".proj."),),
    MaxxVit: (),
    TinyVit: (
        (r"^(stages\.0\.blocks\.\d+)\.mlp\.fc1\.", r"\1.conv1.conv."),
        (r"^(stages\.0\.blocks\.\d+)\.mlp\.between\.", r"\1.conv2."),
        (r"^(stages\.0\.blocks\.\d+)\.mlp\.fc2\.", r"\1.conv3.conv."),
        (r"(blocks\.\d+)\.norm1\.", r"\1.attn.norm."),
        (r"(blocks\.\d+)\.norm2\.", r"\1.mlp.norm."),
    ),
}
"""What a name was, and what it is."""
_Levit = Attention | AttentionOfTinyVit


def is_hierarchy(model: TracedModule) -> bool:
    """Whether that version had blocks of its own for the model."""
    return issubclass(traced_state(model).plain, tuple(_MOVED))


def as_timms(model: TracedModule, sites: Entries, state: State, *, where: str) -> tuple[Entries, State]:
    """Sites and weights as they were written by timm's names, and of those that never change the model's own set.
    Raises BadInput for tables of positions whose network was not written.
    """
    own = next(moved for kind, moved in _MOVED.items() if issubclass(traced_state(model).plain, kind))
    moved = (*_EVERYWHERE, *own)
    sites = {_renamed(f"{name}.", moved).rstrip("."): entry for name, entry in sites.items()}
    ours = {_renamed(name, moved): tensor for name, tensor in state.items()}
    for name, module in model.named_modules():
        if isinstance(module, RelPosMlp):
            raise BadInput(
                f"{where}: {traced_state(model).plain.__name__} that version 0.1 wrote, whose positions are told by a "
                "network of which that version wrote the results alone; reduce the dense model again"
            )
        if isinstance(module, _Levit) or (isinstance(module, Attention2d | AttentionCl) and module.head_first):
            require_widths(name, sites.get(name, {}), where)
            heads, qk, v = (sites[name][part] for part in ("heads", "qk", "v"))
            for key in (f"{name}.qkv.weight", f"{name}.qkv.bias"):
                if key in ours and len(ours[key]) == heads * (2 * qk + v):
                    # Rows of all queries, keys and values as rows of head after head.
                    parts = ours[key].split((heads * qk, heads * qk, heads * v))
                    ours[key] = torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)
    ours = dict(_placed(name, each, model) for name, each in ours.items())
    shapes = {name: each.shape for name, each in model.state_dict().items()}
    stay = {name: each for name, each in ours.items() if shapes.get(name) == each.shape}
    model.load_state_dict(stay, strict=False)
    return sites, ours


def _renamed(name: str, moved: tuple[tuple[str, str], ...]) -> str:
    for pattern, new in moved:
        name = re.sub(pattern, new, name)
    return name


def _placed(key: str, tensor: Tensor, model: nn.Module) -> tuple[str, Tensor]:
    """A table of positions [T,H] by timm's name and in its shape, zeros for heads that are gone, which are the last."""
    path, found, _ = key.partition("position_bias.table")
    if not found:
        return key, tensor
    attention = model.get_submodule(path.rstrip("."))
    owner = attention if isinstance(attention, _Levit) else attention.get_submodule("rel_pos")
    name = f"{path}attention_biases" if owner is attention else f"{path}rel_pos.relative_position_bias_table"
    dense = model.get_parameter(name)
    table_TH = functional.pad(tensor, (0, dense.numel() // len(tensor) - tensor.shape[1]))
    return name, table_TH if isinstance(owner, RelPosBias) else table_TH.T.reshape(dense.shape)


def is_eva(model: TracedModule) -> bool:
    return issubclass(traced_state(model).plain, Eva)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RopePlanes:
    """What positions turn in an attention: planes in the order in which they were kept, and which planes they are."""

    tables_2HNK: Tensor
    planes_HK: Tensor
    halves: bool

    def rows(self, rows_RX: Tensor) -> Tensor:
        """Of queries, keys or a norm over a head, in timm's order: neighbours are a plane unless halves are."""
        heads = len(rows_RX) // (2 * self.planes_HK.shape[1])
        by_plane = rows_RX.unflatten(0, (heads, 2, -1))
        order_HK = self.planes_HK[:heads].argsort(1)
        by_plane = torch.stack([each[:, order] for each, order in zip(by_plane, order_HK, strict=True)])
        return (by_plane if self.halves else by_plane.transpose(1, 2)).flatten(0, 2)

    def tables(self) -> Iterator[tuple[str, Tensor]]:
        order_HK = self.planes_HK[: self.tables_2HNK.shape[1]].argsort(1)
        own = torch.stack([self.tables_2HNK[:, head, :, order] for head, order in enumerate(order_HK)], dim=1)
        doubled = own.repeat(1, 1, 1, 2) if self.halves else own.repeat_interleave(2, -1)
        yield from zip(("rotary.0", "rotary.1"), doubled, strict=True)


def as_timms_eva(
    model: TracedModule, sites: Entries, state: State, built: Callable[[], nn.Module], *, where: str
) -> tuple[State, Mapping[str, Index]]:
    """Weights by timm's names, with sines and cosines as `rotary.0` and `rotary.1` of each attention; and what is left
    of queries and keys that positions turn.
    """
    groups = {each.name: each.groups_HP for each in sites_of(model).every if isinstance(each, TracedPairs)}
    dense, kept, ours = cache(lambda: _dense_tables(built())), dict[str, Index](), dict(state)
    for name, attention in model.named_modules():
        if not isinstance(attention, AttentionRope | EvaAttention):
            continue
        own = {key.removeprefix(f"{name}."): ours.pop(key) for key in state if key.startswith(f"{name}.")}
        if name not in sites:  # it was timm's own
            turns = own.pop("sin_cos_ND", None)
            ours |= {f"{name}.{key.removeprefix('inner.')}": each for key, each in own.items()}
            if turns is not None:
                ours |= zip((f"{name}.rotary.0", f"{name}.rotary.1"), turns[None].chunk(2, dim=-1), strict=True)
            continue
        require_widths(name, sites[name], where)
        try:
            rope = _turns(own, sites[name], attention, dense)
            ours |= {f"{name}.{key}": each for key, each in _as_timms(own, sites[name], attention, rope)}
            if rope is not None and f"{name}.qk" in groups:
                own_HP = groups[f"{name}.qk"][: len(rope.planes_HK)]
                kept[f"{name}.qk"] = own_HP.gather(1, rope.planes_HK).flatten().sort().values.numpy()
        except RuntimeError:  # of shapes
            raise BadInput(
                f"{where}: the weights of {name!r} are of other widths than its entry; the file was edited or damaged, "
                "write the model again"
            ) from None
    return ours, kept


def _turns(own: State, entry: Mapping[str, Any], attention: Any, dense: Callable[[], Tensor]) -> _RopePlanes | None:
    """None where nothing is turned. Of learned frequencies, as they are now, any planes are these."""
    if "rotary.freqs_2HP" in own:
        angles_HNK = (own["rotary.places_2N"][:, None, :, None] * own["rotary.freqs_2HP"][:, :, None]).sum(0)
        tables_2HNK = torch.stack((angles_HNK.sin(), angles_HNK.cos()))
        planes_HK = torch.arange(tables_2HNK.shape[-1])[None]
    elif "rotary.sin_HNP" in own:
        tables_2HNK = torch.stack((own["rotary.sin_HNP"], own["rotary.cos_HNP"]))
        planes_HK = _planes(tables_2HNK, dense())
    else:
        return None
    planes_HK = planes_HK.expand(entry["heads"], -1)
    return _RopePlanes(tables_2HNK=tables_2HNK, planes_HK=planes_HK, halves=attention.rotate_half)


def _dense_tables(model: nn.Module) -> Tensor:
    assert isinstance(model, Eva), type(model)
    rope: Any = model.rope
    table_TX = rope.get_embed(list(model.patch_embed.grid_size) if model.dynamic_img_size else None)
    sin_cos_2TX = torch.stack(table_TX.chunk(2, dim=-1))
    attention: Any = model.blocks[0].get_submodule("attn")
    return sin_cos_2TX.chunk(2, dim=-1)[0] if attention.rotate_half else sin_cos_2TX[..., ::2]


def _planes(tables_2HNK: Tensor, dense_2TP: Tensor) -> Tensor:
    """Which of the dense model's planes turn as these do, each once [H,K]."""
    of_patches = tables_2HNK[:, :, -dense_2TP.shape[1] :].permute(1, 3, 0, 2).flatten(2)
    away_HKP = torch.cdist(of_patches, dense_2TP.permute(2, 0, 1).flatten(1))
    planes = list[Tensor]()
    for place in range(away_HKP.shape[1]):
        planes.append(away_HKP[:, place].argmin(1, keepdim=True))
        away_HKP.scatter_(2, planes[-1][:, None].expand(-1, away_HKP.shape[1], -1), torch.inf)
    return torch.cat(planes, dim=1)


def _as_timms(
    own: State, entry: Mapping[str, Any], attention: Any, rope: _RopePlanes | None
) -> Iterator[tuple[str, Tensor]]:
    """Rows in the layers that timm has, planes in its order."""
    heads, qk, v = entry["heads"], entry["qk"], entry["v"]
    in_timm_order = rope.rows if rope is not None else lambda rows_RX: rows_RX
    for key, each in own.items():
        if key in ("qkv.weight", "qkv.bias"):
            queries, keys, values = each.split((heads * qk, heads * qk, heads * v))
            yield from _in_layers(key, {"q": in_timm_order(queries), "k": in_timm_order(keys), "v": values}, attention)
        elif key.startswith(("q_norm.", "k_norm.")):
            yield key, in_timm_order(each)
        elif not key.startswith("rotary."):
            yield key, each
    if rope is not None:
        yield from rope.tables()


def _in_layers(key: str, parts: Mapping[str, Tensor], attention: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """One for all, or one each, without the bias of zeros that timm's has not."""
    layers = dict(attention.named_children())
    if "qkv" in layers:
        yield key, torch.cat([*parts.values()])
        return
    for part, rows in parts.items():
        if key == "qkv.weight" or layers[f"{part}_proj"].bias is not None or bool(rows.any()):
            yield key.replace("qkv", f"{part}_proj"), rows
