"""Where calibration listens to the queries and keys of a traced attention, and which pairs of them count.

Legend: H heads, N tokens, D dimensions of a head, W windows, V parts of windows whose tokens see each other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from calib.sites import HeadTaps, InputTap, Role, Tap
from corp_deploy.traced.programs.attention_masks import (
    PRODUCTS,
    SDPA,
    added_scores,
    scale_of,
    unread_queries,
    values_product,
    visible_keys,
)
from corp_deploy.traced.programs.program import Program, operation, sizes_at_one

from .heads import BothHeads, Heads
from .module import Tracing


class _TokenTap(Tap):
    """One number of every token that a tap hears, [B,N,1]: so they are counted."""

    __slots__ = ()

    def listen(self, site: str, hear: Callable[[Tensor], None]) -> Any:
        return super().listen(site, lambda x: hear(x.select(-3, 0)[..., :1].flatten(1, -2)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PairTaps(HeadTaps):
    """What heads make of values is of no interest here; tokens are counted where `counted` hears them."""

    counted: Tap

    @property
    def taps(self) -> Mapping[Role, Tap | InputTap]:
        return {"q": self.queries, "k": self.keys, "z": _TokenTap(module=self.counted.module, take=self.counted.take)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Counting:
    """Of an attention's pairs. `read`: where queries go somewhere, laid out as they are of one image [...,N,1];
    `parts_V` and `slots_VN`: the window of each part, and which of its tokens are there; None for all.
    `is_causal`, `plane_scale`: see HeadTaps.
    """

    read: Tensor | None = None
    parts_V: Tensor | None = None
    slots_VN: Tensor | None = None
    is_causal: bool = False
    plane_scale: float | None = None

    def queries(self, x: Tensor, heads: Heads) -> Tensor:
        """With zeros where they go nowhere."""
        if self.read is not None:
            x = heads.batch.back(heads.batch.in_front(x) * heads.batch.in_front(self.read.to(x)))
        return self.parts(heads(x))

    def parts(self, x: Tensor) -> Tensor:
        """[B,W,H,N,D] by part."""
        return x if self.parts_V is None else x.index_select(1, self.parts_V.to(x.device))


def taps_of(name: str, tracing: Tracing, both: BothHeads, nodes: tuple[str, str, str]) -> HeadTaps:
    """Of what makes queries and keys, and of their product. Pairs of tokens that never see each other do not count, nor
    do queries that go nowhere, as those of padding, where the program says so of every image.
    """
    queries, keys = (tracing.hooked[2][source] for source in nodes[:2])
    counting = _counting(tracing.program, both, *(tracing.by_node[each] for each in nodes))
    return _PairTaps(
        name=name,
        queries=Tap(module=queries, take=lambda x: counting.queries(x, both.queries)),
        keys=Tap(module=keys, take=lambda x: counting.parts(both.keys(x))),
        output=queries,
        counted=Tap(module=queries, take=both.queries),
        merge=tracing.merge_before(nodes[0]),
        slots_WN=counting.slots_VN,
        causal=counting.is_causal,
        plane_scale=counting.plane_scale,
    )


def _counting(program: Program, both: BothHeads, queries: fx.Node, keys: fx.Node, product: fx.Node) -> _Counting:
    heads, sizes = both.queries, sizes_at_one(queries)
    is_told = product.args[0] is queries and operation(product) in (SDPA, *PRODUCTS)
    if not is_told or any(each.is_meta for each in program.graph.parameters()):
        return _Counting()
    output, added = values_product(product), added_scores(program, product)
    gone = None if output is None else unread_queries(program, output)
    read = None if gone is None else (~gone).unsqueeze(-1)
    others = sizes_at_one(keys)[-2 if operation(product) == SDPA else -1]
    seen_WNM = None if added is None else heads.by_window(visible_keys(added).expand(*sizes[:-1], others))
    if seen_WNM is None or heads.places_HTD.shape[1] > 1 or bool(seen_WNM.all()):
        return _Counting(read=read)
    if len(seen_WNM) == 1:
        is_causal = sizes[-2] == others and torch.equal(seen_WNM[0], torch.ones_like(seen_WNM[0]).tril())
        in_planes = is_causal and both.joined == 2 and operation(product) == SDPA
        return _Counting(read=read, is_causal=is_causal, plane_scale=scale_of(product) if in_planes else None)
    parts = _parts(seen_WNM)
    return _Counting(read=read) if parts is None else _Counting(read=read, parts_V=parts[0], slots_VN=parts[1])


def _parts(seen_WNN: Tensor) -> tuple[Tensor, Tensor] | None:
    """The window of each part and its tokens [V,N], 1 or 0; None where tokens of windows don't fall into such."""
    by_window = [torch.unique(seen_NN, dim=0) for seen_NN in seen_WNN]
    is_apart = all(
        torch.equal(each_VN.sum(0), torch.ones_like(each_VN[0]).long())
        and torch.equal(each_VN[each_VN.long().argmax(0)], seen_NN)
        for each_VN, seen_NN in zip(by_window, seen_WNN, strict=True)
    )
    windows_V = torch.arange(len(by_window)).repeat_interleave(torch.tensor([len(each) for each in by_window]))
    return (windows_V, torch.cat(by_window).float()) if is_apart else None
