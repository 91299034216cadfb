"""Decoders as version 0.1 wrote them: widths of heads without a program, and how fast the planes turn that each keeps.

Legend: H heads or 1 for all, N tokens, P planes of a dense head, K of them that are left.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from corp_deploy.traced.finding.site import Index, Site
from corp_deploy.traced.models.module import TracedModule
from corp_deploy.traced.models.narrowing import first_groups
from corp_deploy.traced.models.offered import names_of
from ground.errors import BadInput

from .architecture import Architecture
from .decoder import arguments_of
from .head_attention import SequenceRotary
from .text_decoder import DecoderArchitecture
from .timm_legacy import require_widths
from .traced_model import tracing

State = Mapping[str, Tensor]
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
        kept |= _kept(name, sites[name], arguments.decoder, groups, turning_HK)
        if turning_HK is not None:
            ours |= _tables(name, turning_HK, arguments.text.length)
    return ours, kept


def _kept(
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


def _tables(name: str, freqs_HK: Tensor, tokens: int) -> Iterator[tuple[str, Tensor]]:
    """Sines and cosines, as the program folds them; one row where all heads keep the same planes."""
    own_HK = freqs_HK[:1] if bool((freqs_HK == freqs_HK[:1]).all()) else freqs_HK
    sin_HNP, cos_HNP = SequenceRotary(own_HK).tables(tokens)
    yield f"{name}.{_TURNING}", sin_HNP
    yield f"{name}.{_TURNING}_folded_1", cos_HNP
