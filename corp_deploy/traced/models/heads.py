"""Heads of a traced attention: their places in queries and keys of any layout, and the taps that calibration hooks.

Legend: G groups of a site, H heads, T heads that share their keys, D dimensions of a head, N tokens, W windows, V parts
of windows whose tokens see each other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from calib.sites import HeadTaps, Role, Tap
from corp_deploy.traced.finding.labels import first_along
from corp_deploy.traced.finding.product import equation_of
from corp_deploy.traced.finding.site_groups import Span
from corp_deploy.traced.programs.attention_masks import (
    PRODUCTS,
    SDPA,
    added_scores,
    attention_scale,
    find_attention_output,
    unread_queries,
    visible_keys,
)
from corp_deploy.traced.programs.program import BatchAxis, Program, batch_axis_of, operation, sizes_at_one

from .module import Tracing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadPlaces:
    """The layout of heads in a tensor whose images are brought in front (see BatchAxis).

    `windows`, `tokens`: the axes of one image that count windows which don't see each other, and tokens. `places_HTD`:
    the places of the heads' elements along all `others`, flattened.
    """

    batch: BatchAxis
    windows: tuple[int, ...]
    tokens: tuple[int, ...]
    others: tuple[int, ...]
    places_HTD: Tensor

    def by_window(self, scores: Tensor) -> Tensor | None:
        """Return one image's scores [..., queries, keys] as [W,N,M]; None if heads differ or tokens have other axes."""
        front = self.batch.in_front(scores)[0]
        last = len(front.shape) - 2
        if self.tokens != (last,):
            return None
        heads = [dim for dim in range(last) if dim not in self.windows]
        by_head = front.permute(*self.windows, *heads, last, last + 1)
        by_head = by_head.reshape(math.prod(front.shape[dim] for dim in self.windows), -1, *front.shape[-2:])
        alike = bool((by_head == by_head[:, :1]).all())
        return by_head[:, 0] if alike else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the heads [B,H,N,D], or [B,W,H,N,D] in windows; heads that share keys stand one after the other."""
        front = self.batch.in_front(x)
        flat = front.permute(0, *(1 + dim for dim in (*self.windows, *self.tokens, *self.others)))
        windows, tokens = (math.prod(front.shape[1 + dim] for dim in dims) for dims in (self.windows, self.tokens))
        shape, places = (len(front), windows, tokens), self.places_HTD
        whole = places.numel() * math.prod(shape) == x.numel()
        if whole and torch.equal(places.flatten(), torch.arange(places.numel(), device=places.device)):
            by_place = flat.reshape(*shape, *places.shape)  # mostly a view; indexing would take a tenth of a pass
        else:
            by_place = flat.reshape(*shape, -1)[..., places.to(x.device)]
        by_head: Tensor = by_place.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)
        return by_head if windows > 1 else by_head[:, 0]

    def of_one(self, x: Tensor) -> Tensor:
        """Return one image's heads [X,H,T,D], with the X tokens of all windows along one axis."""
        by_head: Tensor = self(x)[0].unflatten(-2, (self.places_HTD.shape[1], -1)).movedim(-2, 0)
        return by_head if by_head.dim() == 4 else by_head.flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BothHeads:
    """The layouts of queries and keys, and the site's group of each dimension, `groups_HTD`.

    `joined`: the number of dimensions of a head that form one group, at p, P + p and so on for P groups of a head.
    `shared`: the number of consecutive heads with the same groups. `complete`: the site has all dimensions of heads.
    """

    queries: HeadPlaces
    keys: HeadPlaces
    groups_HTD: Tensor
    joined: int
    shared: int
    complete: bool

    @property
    def groups_HP(self) -> Tensor:
        """The groups [H,P] of each head without repetition, one row for all heads that share groups."""
        return self.groups_HTD[:: self.shared, 0, : self.groups_HTD.shape[2] // self.joined]


def both_heads(reader: fx.Node, spans: tuple[Span, Span], nodes: tuple[fx.Node, fx.Node], rows: int) -> BothHeads | str:
    """Find the heads of the queries and keys that `reader` multiplies, or return the reason why that is impossible.

    `rows`: the number of layers' rows that write a group. If it exceeds those of one head's queries and keys, several
    heads share a group, and no axis counts windows.
    """
    equation = equation_of(reader)
    if equation is not None and len(set.intersection(*map(set, equation.letters)) - set(equation.out)) > 1:
        return "its products are summed over several axes at once"
    labels, sizes = zip(*(_labels(span, node) for span, node in zip(spans, nodes, strict=True)), strict=True)
    if any(batch_axis_of(node) is None for node in nodes):
        return "the batch axis of its queries or keys is unknown"
    counts = range(len(spans[0].axes) - 1)
    own = [
        place
        for place in counts
        if sizes[0][place] != sizes[1][place] or any(bool((x != x.narrow(place, 0, 1)).any()) for x in labels)
    ]
    found = _heads_along(spans, nodes, labels, sizes, own)
    if isinstance(found, str) or rows <= found.joined * (found.groups_HTD.shape[1] + 1) or len(own) == len(counts):
        return found
    again = _heads_along(spans, nodes, labels, sizes, list(counts))
    return found if isinstance(again, str) else again


def _heads_along(
    spans: tuple[Span, Span],
    nodes: tuple[fx.Node, fx.Node],
    labels: Sequence[Tensor],
    sizes: Sequence[tuple[int, ...]],
    own: list[int],
) -> BothHeads | str:
    """Find heads if the axes at these places of the spans count heads, and all others windows."""
    counts = range(len(spans[0].axes) - 1)
    by_head, places = [], []
    for each, of_axes, most in zip(labels, sizes, sizes[::-1], strict=True):
        kept = first_along(each, [*own, len(counts)])
        number = torch.arange(kept.numel()).view(kept.shape)
        for dim, place in enumerate(own):
            times = max(most[place] // of_axes[place], 1)
            kept, number = (x.repeat_interleave(times, dim) for x in (kept, number))
        by_head.append(kept.flatten(0, -2) if kept.dim() > 1 else kept[None])
        places.append(number.flatten(0, -2) if number.dim() > 1 else number[None])
    arranged = _arranged(by_head[0], by_head[1])
    if arranged is None:
        return "its heads do not share dimensions evenly"
    order_HTD, joined, shared = arranged
    sides = []
    for span, node, number, order in zip(spans, nodes, places, (order_HTD, order_HTD[:, :1]), strict=True):
        others = tuple(span.axes[place] for place in (*own, len(span.axes) - 1))
        windows = tuple(span.axes[place] for place in counts if place not in own)
        batch = batch_axis_of(node)
        assert batch is not None, node
        sides.append(
            HeadPlaces(
                batch=batch,
                windows=windows,
                tokens=tuple(dim for dim in range(len(sizes_at_one(node))) if dim not in (*others, *windows)),
                others=others,
                places_HTD=number.flatten()[order],
            )
        )
    groups_HTD, complete = by_head[0].flatten()[order_HTD], bool((by_head[0] >= 0).all())
    queries, keys = sides
    return BothHeads(queries=queries, keys=keys, groups_HTD=groups_HTD, joined=joined, shared=shared, complete=complete)


def _labels(span: Span, node: fx.Node) -> tuple[Tensor, tuple[int, ...]]:
    sizes = tuple(sizes_at_one(node)[dim] for dim in span.axes)
    labels = torch.full((int(np.prod(sizes)),), -1)
    groups, places = span.index_GM.shape
    labels[torch.from_numpy(span.index_GM).flatten()] = torch.arange(groups).repeat_interleave(places)
    return labels.view(sizes), sizes


def _arranged(queries_HD: Tensor, keys_HD: Tensor) -> tuple[Tensor, int, int] | None:
    """Return places [H,T,D] of heads' elements in [H D], `joined` and `shared` of BothHeads; None if heads differ."""
    if queries_HD.shape != keys_HD.shape or not torch.equal(queries_HD, keys_HD):
        return None
    lines = [line[line >= 0] for line in queries_HD]
    heads = [head for head, line in enumerate(lines) if len(line)]
    sizes = {len(lines[head]) for head in heads}
    joined = {tuple(torch.unique(lines[head], return_counts=True)[1].unique().tolist()) for head in heads}
    if len(sizes) != 1 or len(joined) != 1 or len(next(iter(joined))) != 1:
        return None
    together: dict[tuple[int, ...], list[int]] = {}
    for head in heads:
        together.setdefault(tuple(lines[head].sort().values.tolist()), []).append(head)
    shared = {len(each) for each in together.values()}
    sets = list(together)
    if len(shared) != 1 or sum(len(set(each)) for each in sets) != len(set[int]().union(*sets)):
        return None
    order_HD = torch.stack([_by_group(queries_HD, head) for each in together.values() for head in each])
    count, (every,) = next(iter(shared)), next(iter(joined))
    folded = count if every == 1 else 1
    return order_HD.view(-1, folded, order_HD.shape[1]), every, count // folded


def _by_group(labels_HD: Tensor, head: int) -> Tensor:
    """Return the places of a head's elements in [H D]: the first of every group, then the second of each."""
    at = torch.nonzero(labels_HD[head] >= 0)[:, 0]
    at = at[labels_HD[head, at].argsort(stable=True)]
    each = int((labels_HD[head, at] == labels_HD[head, at[0]]).sum())
    return head * labels_HD.shape[1] + at.view(-1, each).T.flatten()


class _TokenTap(Tap):
    """A tap that hears one number of every token [B,N,1], to count tokens."""

    __slots__ = ()

    def listen(self, site: str, hear: Callable[[Tensor], None]) -> Any:
        return super().listen(site, lambda x: hear(x.select(-3, 0)[..., :1].flatten(1, -2)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PairTaps(HeadTaps):
    """Taps of queries and keys alone; `counted` counts tokens in place of the heads' outputs."""

    counted: Tap

    @property
    def taps(self) -> Mapping[Role, Tap]:
        return {"q": self.queries, "k": self.keys, "z": _TokenTap(module=self.counted.module, take=self.counted.take)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Counting:
    """The pairs of queries and keys that the statistics of an attention count.

    `read`: the mask of queries that something reads, in the layout of one image [...,N,1]. `parts_V`, `slots_VN`: the
    window of each part and the mask of its tokens; None for whole windows. `is_causal`, `plane_scale`: see HeadTaps.
    """

    read: Tensor | None = None
    parts_V: Tensor | None = None
    slots_VN: Tensor | None = None
    is_causal: bool = False
    plane_scale: float | None = None

    def queries(self, x: Tensor, heads: HeadPlaces) -> Tensor:
        """Return the queries by part, zero where nothing reads them."""
        if self.read is not None:
            x = heads.batch.back(heads.batch.in_front(x) * heads.batch.in_front(self.read.to(x)))
        return self.parts(heads(x))

    def parts(self, x: Tensor) -> Tensor:
        """Return windows [B,W,H,N,D] by part, [B,V,H,N,D], or unchanged if parts are whole windows."""
        return x if self.parts_V is None else x.index_select(1, self.parts_V.to(x.device))


def taps_of(name: str, tracing: Tracing, both: BothHeads, nodes: tuple[str, str, str]) -> HeadTaps:
    """Return the taps of an attention's queries and keys; `nodes` names the queries, the keys and their product.

    Pairs of tokens that see each other in no image don't count, nor do queries that nothing reads, such as padding.
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
    output, added = find_attention_output(product), added_scores(program, product)
    gone = None if output is None else unread_queries(program, output)
    read = None if gone is None else (~gone).unsqueeze(-1)
    others = sizes_at_one(keys)[-2 if operation(product) == SDPA else -1]
    seen_WNM = None if added is None else heads.by_window(visible_keys(added).expand(*sizes[:-1], others))
    if seen_WNM is None or heads.places_HTD.shape[1] > 1 or bool(seen_WNM.all()):
        return _Counting(read=read)
    if len(seen_WNM) == 1:
        is_causal = sizes[-2] == others and torch.equal(seen_WNM[0], torch.ones_like(seen_WNM[0]).tril())
        in_planes = is_causal and both.joined == 2 and operation(product) == SDPA
        return _Counting(read=read, is_causal=is_causal, plane_scale=attention_scale(product) if in_planes else None)
    parts = _parts(seen_WNM)
    return _Counting(read=read) if parts is None else _Counting(read=read, parts_V=parts[0], slots_VN=parts[1])


def _parts(seen_WNN: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the window of each part and the mask [V,N] of its tokens; None if windows don't divide into parts."""
    by_window = [torch.unique(seen_NN, dim=0) for seen_NN in seen_WNN]
    is_apart = all(
        torch.equal(each_VN.sum(0), torch.ones_like(each_VN[0]).long())
        and torch.equal(each_VN[each_VN.long().argmax(0)], seen_NN)
        for each_VN, seen_NN in zip(by_window, seen_WNN, strict=True)
    )
    windows_V = torch.arange(len(by_window)).repeat_interleave(torch.tensor([len(each) for each in by_window]))
    return (windows_V, torch.cat(by_window).float()) if is_apart else None
