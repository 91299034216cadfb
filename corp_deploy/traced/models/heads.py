"""Heads of a traced attention: where the dimensions of each stand in queries or keys, however these are arranged.

Legend: G groups of a site, H heads, T heads that share their keys, D dimensions of a head, N tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from corp_deploy.traced.finding.labels import standing
from corp_deploy.traced.finding.product import equation_of
from corp_deploy.traced.finding.site import Span
from corp_deploy.traced.programs.program import Batch, batch_of, sizes_at_one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heads:
    """Of a tensor with its images in front (see Batch): which of its axes, as they are of one image, count windows that
    see no other, and tokens; `places_HTD` are the elements of heads among those of all other axes.
    """

    batch: Batch
    windows: tuple[int, ...]
    tokens: tuple[int, ...]
    others: tuple[int, ...]
    places_HTD: Tensor

    def by_window(self, scores: Tensor) -> Tensor | None:
        """Scores of the pairs of one image [..., queries, keys] by window [W,N,M]; None where heads differ in it."""
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
        """[B,H,N,D], or [B,W,H,N,D] in windows; heads that share their keys one behind the other, as more tokens."""
        front = self.batch.in_front(x)
        flat = front.permute(0, *(1 + dim for dim in (*self.windows, *self.tokens, *self.others)))
        windows, tokens = (math.prod(front.shape[1 + dim] for dim in dims) for dims in (self.windows, self.tokens))
        shape, places = (len(front), windows, tokens), self.places_HTD
        whole = places.numel() * math.prod(shape) == x.numel()
        if whole and torch.equal(places.flatten(), torch.arange(places.numel(), device=places.device)):
            by_place = flat.reshape(*shape, *places.shape)  # a view, mostly: picking copies, a tenth of a pass in all
        else:
            by_place = flat.reshape(*shape, -1)[..., places.to(x.device)]
        by_head: Tensor = by_place.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)
        return by_head if windows > 1 else by_head[:, 0]

    def of_one(self, x: Tensor) -> Tensor:
        """Of one image [X,H,T,D], its tokens of all windows in one."""
        by_head: Tensor = self(x)[0].unflatten(-2, (self.places_HTD.shape[1], -1)).movedim(-2, 0)
        return by_head if by_head.dim() == 4 else by_head.flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BothHeads:
    """Queries and keys: `groups_HTD` are the site's groups, those of a head that go together at one place p of P:
    dimensions p, P + p and so on, so many `joined`. `shared` heads in turn have the same keys. `complete`: all
    dimensions of heads are the site's.
    """

    queries: Heads
    keys: Heads
    groups_HTD: Tensor
    joined: int
    shared: int
    complete: bool

    @property
    def groups_HP(self) -> Tensor:
        """A group for each place of a head that is its own; of heads that share keys those of the first."""
        return self.groups_HTD[:: self.shared, 0, : self.groups_HTD.shape[2] // self.joined]


def both_heads(reader: fx.Node, spans: tuple[Span, Span], nodes: tuple[fx.Node, fx.Node], rows: int) -> BothHeads | str:
    """Of the product of two tensors; or why they can't be told. `rows`: those that layers of queries and keys have of a
    group: more than a head has for its queries and its keys are of several heads, no more are of all windows alike.
    """
    equation = equation_of(reader)
    if equation is not None and len(set.intersection(*map(set, equation.letters)) - set(equation.out)) > 1:
        return "its products are summed over several axes at once"
    labels, sizes = zip(*(_labels(span, node) for span, node in zip(spans, nodes, strict=True)), strict=True)
    if any(batch_of(node) is None for node in nodes):
        return "it can't be told where images stand among its queries and keys"
    counts = range(len(spans[0].axes) - 1)
    own = [
        place
        for place in counts
        if sizes[0][place] != sizes[1][place] or any(bool((x != x.narrow(place, 0, 1)).any()) for x in labels)
    ]
    found = _of_axes(spans, nodes, labels, sizes, own)
    if isinstance(found, str) or rows <= found.joined * (found.groups_HTD.shape[1] + 1) or len(own) == len(counts):
        return found
    again = _of_axes(spans, nodes, labels, sizes, list(counts))
    return found if isinstance(again, str) else again


def _of_axes(
    spans: tuple[Span, Span],
    nodes: tuple[fx.Node, fx.Node],
    labels: Sequence[Tensor],
    sizes: Sequence[tuple[int, ...]],
    own: list[int],
) -> BothHeads | str:
    """With heads along these axes that both have, windows along others."""
    counts = range(len(spans[0].axes) - 1)
    by_head, places = [], []
    for each, of_axes, most in zip(labels, sizes, sizes[::-1], strict=True):
        kept = standing(each, [*own, len(counts)])
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
        batch = batch_of(node)
        assert batch is not None, node
        sides.append(
            Heads(
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
    """For each head its elements of the site among [H D]: [H,T,D], how many of a head go together, how many heads share
    what they keep; None where that isn't even.
    """
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
    """Where a head's elements stand among [H D]: the first of every group, then the second of each."""
    at = torch.nonzero(labels_HD[head] >= 0)[:, 0]
    at = at[labels_HD[head, at].argsort(stable=True)]
    each = int((labels_HD[head, at] == labels_HD[head, at[0]]).sum())
    return head * labels_HD.shape[1] + at.view(-1, each).T.flatten()
