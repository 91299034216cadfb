"""Queries and keys that were found in a traced program: the dimensions of heads, each with a row for either.

Legend: H heads, D dimensions of a head, N tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from calib.sites import HeadTaps, Tap
from corp_deploy.traced.readers import Layer, layers
from corp_deploy.traced.rows import Rows, rows_of
from corp_deploy.traced.site import Site as Groups
from corp_deploy.traced.site import Span

from .traced_module import Tracing
from .traced_site import TracedSite


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """The queries or the keys: which row of which layer each dimension is [H,D], and what hears them."""

    rows: Rows
    rows_HD: Tensor
    tap: Tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedPairs(TracedSite):
    """Of one attention; `groups_HD` are the site's groups by head. `output` hears what heads make of values."""

    kind: ClassVar[str] = "traced queries and keys"
    queries: Side
    keys: Side
    groups_HD: Tensor
    output: nn.Linear

    @property
    def tied(self) -> str:
        return self.groups.name

    @property
    def last(self) -> Layer:
        return self.output

    def listening(self) -> tuple[HeadTaps, ...]:  # type: ignore[override]
        """To queries, keys, and what heads give."""
        return (HeadTaps(name=self.name, queries=self.queries.tap, keys=self.keys.tap, output=self.output),)


def pairs(tracing: Tracing, name: str, groups: Groups, output: nn.Linear | None) -> TracedPairs | str:
    """Or why they stay."""
    if output is None:
        return "what its heads give is read by no linear layer, so that no statistics of them can be taken"
    if not tracing.program.any_batch:
        return "its program is for one batch size alone, so that no statistics can be taken"
    if groups.lumps or len(groups.listening) != 2 or any(span.index_GM.shape[1] > 1 for span in groups.listening):
        return f"several of its dimensions go together ({groups.lumps or 'as keys are shared'}), and none is mixed then"
    sides = [_side(tracing, span) for span in groups.listening]
    queries, keys = sides
    if isinstance(queries, str) or isinstance(keys, str):
        return queries if isinstance(queries, str) else str(keys)
    places_G = [torch.from_numpy(span.index_GM[:, 0]) for span in groups.listening]
    known = {queries.rows.weight, queries.rows.bias, keys.rows.weight, keys.rows.bias}
    touched = {span.name for span in groups.spans}
    whole = len(places_G[0]) == queries.rows_HD.numel() == keys.rows_HD.numel() and torch.equal(*places_G)
    whole = whole and len(queries.rows_HD) == groups.parts
    if not whole or not touched <= known:
        return "something stands between its layers and the dot product, dimension by dimension"
    return TracedPairs(
        name=name,
        groups=groups,
        readings=(),
        program=tracing.program,
        macs_now=tracing.shares.macs[groups.key],
        parameters_now=tracing.shares.parameters[groups.key],
        queries=queries,
        keys=keys,
        groups_HD=places_G[0].argsort().view_as(queries.rows_HD),
        output=output,
    )


def _side(tracing: Tracing, span: Span) -> Side | str:
    node = tracing.by_node[span.name]
    rows = rows_of(node, {layer.node: layer for layer in layers(tracing.program)})
    if rows is None:
        return "something stands between its layers and the dot product, such as a norm or a table of positions"
    numbers, dims = rows.numbers, span.axes[-1]
    if numbers.dim() != 4 or len(numbers) > 1 or span.axes not in ((0, 1, 3), (0, 1, 2)):
        return "its heads stand otherwise than [batch, heads, tokens, dimensions], in windows say"
    by_token_HND = numbers[0] if dims == 3 else numbers[0].transpose(1, 2)
    rows_HD = by_token_HND[:, 0]
    if not bool((by_token_HND == rows_HD[:, None]).all()):
        return "its dimensions are of different rows from token to token"
    take = _as_given if dims == 3 else _turned
    return Side(rows=rows, rows_HD=rows_HD, tap=Tap(module=tracing.heard[2][node.name], take=take))


def _as_given(given: Tensor) -> Tensor:
    return given


def _turned(given: Tensor) -> Tensor:
    return given.transpose(2, 3)
