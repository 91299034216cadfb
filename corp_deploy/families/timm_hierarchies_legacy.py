"""timm's MaxViT, CoAtNet, TinyViT, EfficientFormer and Hiera as version 0.1 wrote them: their blocks' layers moved to
rows of parts over tokens. Their weights go back to timm's names.

Legend: R rows of a layer, H heads, T places of a table.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from timm.layers import RelPosBias, RelPosMlp
from timm.models.efficientformer import Attention, EfficientFormer
from timm.models.efficientformer_v2 import EfficientFormerV2
from timm.models.hiera import Hiera
from timm.models.maxxvit import Attention2d, AttentionCl, MaxxVit
from timm.models.tiny_vit import Attention as AttentionOfTinyVit
from timm.models.tiny_vit import TinyVit
from torch import Tensor, nn
from torch.nn import functional

from corp_deploy.traced.models.module import TracedModule, traced_state
from ground.errors import BadInput

from .timm_legacy import require_widths

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
    state = {_renamed(name, moved): tensor for name, tensor in state.items()}
    for name, module in model.named_modules():
        if isinstance(module, RelPosMlp):
            raise BadInput(
                f"{where}: {traced_state(model).plain.__name__} that version 0.1 wrote, whose positions are told by a "
                "network of which that version wrote the results alone; reduce the dense model again"
            )
        if isinstance(module, _Levit) or (isinstance(module, Attention2d | AttentionCl) and module.head_first):
            require_widths(name, sites.get(name, {}), where)
            state = {**state, **dict(_by_head(name, sites[name], state))}
    state = dict(_placed(name, each, model) for name, each in state.items())
    shapes = {name: each.shape for name, each in model.state_dict().items()}
    stay = {name: each for name, each in state.items() if shapes.get(name) == each.shape}
    model.load_state_dict(stay, strict=False)
    return sites, state


def _renamed(name: str, moved: tuple[tuple[str, str], ...]) -> str:
    for pattern, new in moved:
        name = re.sub(pattern, new, name)
    return name


def _by_head(name: str, entry: Mapping[str, Any], state: State) -> Iterator[tuple[str, Tensor]]:
    """An attention's rows of all queries, keys and values as rows of head after head."""
    heads, widths = entry["heads"], (entry["qk"], entry["qk"], entry["v"])
    for key in (f"{name}.qkv.weight", f"{name}.qkv.bias"):
        if key in state and len(state[key]) == heads * sum(widths):
            parts = state[key].split([heads * width for width in widths])
            yield key, torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


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
