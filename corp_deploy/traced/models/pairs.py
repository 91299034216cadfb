"""Sites of queries and keys: the dimensions of heads, and the rows of the layers that make them.

Legend: H heads, T heads that share their keys, D dimensions of a head, P groups of a head, R kept dimensions, N tokens,
G groups, M rows that write a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from calib.sites import HeadTaps
from corp_deploy.traced.finding.site_groups import SiteGroups
from corp_deploy.traced.programs.subprogram import Subprogram, subprogram_before

from .heads import BothHeads, HeadPlaces, both_heads, taps_of
from .module import Tracing
from .sites import Site
from .units import EXACT

Mixing = Literal["free", "planes", "none"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """The rows of a layer that make queries or keys, each with a scale and a shift, float64 [H,T,D].

    Scales and shifts come from norms by channel between the layer and the product, for example.
    """

    weight: str
    bias: str
    rows_HTD: Tensor
    scale_HTD: Tensor
    shift_HTD: Tensor

    def on_rows(self, map_HRD: Tensor, kept_HR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Translate a map [H,R,D] of all dimensions to the kept ones into a map of the layer's rows.

        Returns the numbers of the kept rows [H,T,R], the map of all rows [H,T,R,D] and the shift [H,T,R].
        """
        at_HTR = kept_HR[:, None].expand(-1, self.rows_HTD.shape[1], -1)
        rows_HTD, scale_HTD, shift_HTD = (
            each.to(map_HRD.device) for each in (self.rows_HTD, self.scale_HTD, self.shift_HTD)
        )
        scale_HTR, shift_HTR = scale_HTD.gather(2, at_HTR), shift_HTD.gather(2, at_HTR)
        map_HTRD = map_HRD[:, None] * scale_HTD[:, :, None] / scale_HTR[..., None]
        added_HTR = ((map_HRD[:, None] @ shift_HTD[..., None])[..., 0] - shift_HTR) / scale_HTR
        return rows_HTD.gather(2, at_HTR), map_HTRD, added_HTR


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The mixing of dimensions that the nodes between their layers and the dot product allow.

    `mixing`: free within a head, complex factors of rotary `planes`, or none, for the `reason`. `sides`: the layers'
    rows of queries and of keys, empty for none.
    """

    mixing: Mixing
    sides: tuple[Side, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, for the cached properties
class TracedPairs(Site):
    """The queries and keys of one attention, with the layout `both`, that the nodes `sources` give to `product`.

    `behind`: the name of the layer's node that reads the heads' outputs, or empty.
    """

    kind: ClassVar[str] = "traced queries and keys"
    tracing: Tracing
    both: BothHeads
    sources: tuple[str, str]
    product: str
    behind: str

    @property
    def tied(self) -> str:
        return self.name if self.both.complete else ""

    @property
    def groups_HP(self) -> Tensor:
        return self.both.groups_HP

    @property
    def dims(self) -> int:
        """The number of dimensions of a head."""
        return self.both.groups_HTD.shape[2]

    def listening(self) -> tuple[HeadTaps, ...]:  # type: ignore[override]
        return (self._taps,)

    @cached_property
    def _taps(self) -> HeadTaps:
        return taps_of(self.name, self.tracing, self.both, (*self.sources, self.product))

    @cached_property
    def repair(self) -> Repair:
        """The Repair that the program allows, found by running it with the weights."""
        return _repair(self.tracing, self.groups, self.both)


def build_pairs(tracing: Tracing, own: Mapping[str, Any], behind: str) -> TracedPairs | str:
    """Build the site from `own`, the fields that all sites have, or return the reason why it is refused."""
    groups: SiteGroups = own["groups"]
    # The queries and keys of the first product are read by one node.
    spans = next((one, other) for one, other in pairwise(groups.listening) if one.reader == other.reader)
    nodes = tracing.by_node[spans[0].name], tracing.by_node[spans[1].name]
    weights = [span for span in groups.writers if tracing.program.tensor(span.name).dim() > 1]
    rows = sum(span.index_GM.shape[1] for span in weights)
    both = both_heads(tracing.by_node[spans[0].reader], spans, nodes, rows)
    if isinstance(both, str):
        return both
    if both.groups_HP.unique().numel() != groups.size:
        return "its heads do not share dimensions evenly"
    sources, product = (nodes[0].name, nodes[1].name), spans[0].reader
    return TracedPairs(**own, readings=(), tracing=tracing, both=both, sources=sources, product=product, behind=behind)


def _repair(tracing: Tracing, groups: SiteGroups, both: BothHeads) -> Repair:
    if len(groups.listening) != 2:
        return Repair(mixing="none", reason="more than one product reads them")
    none = Repair(mixing="none", reason="the operations between them and their layers do not allow mixing them")
    if both.joined > 2:
        return none
    sides = list[Side]()
    for span, heads in zip(groups.listening, (both.queries, both.keys), strict=True):
        piece = subprogram_before(tracing.program, tracing.by_node[span.name])
        side = None if piece is None else _side(piece, groups, heads, both)
        if side is None:
            return none
        sides.append(side)
    named = [(name, side) for side in sides for name in (side.weight, side.bias)]
    own = [(name, row) for name, side in named for row in side.rows_HTD.unique().tolist()]
    written = {(span.name, row) for span in groups.writers for row in span.index_GM.flatten().tolist()}
    if len(set(own)) != len(own) or not written <= set(own):
        return none
    return Repair(mixing="planes" if both.joined == 2 else "free", sides=tuple(sides))


def _side(piece: Subprogram, groups: SiteGroups, heads: HeadPlaces, both: BothHeads) -> Side | None:
    """Find the Side of one layer by setting one row of every group at a time; None if mixing by its rows fails."""
    span = next((each for each in groups.writers if (each.name, each.axes) == (piece.layer.weight, (0,))), None)
    if span is None or piece.program.tensor(span.name).is_meta:
        return None
    rows_GM = torch.from_numpy(span.index_GM)
    groups_HTD = both.groups_HTD[:, : heads.places_HTD.shape[1]]
    zeros = torch.zeros(piece.sizes, dtype=torch.float64, device=piece.program.tensor(span.name).device)
    # Rotary embeddings may compute in float32.
    shift_XHTD = heads.of_one(piece(zeros)).cpu().double()
    ones = [heads.of_one(piece(zeros.index_fill(piece.row_axis, each.to(zeros.device), 1.0))) for each in rows_GM.T]
    response_MXHTD = torch.stack(ones).cpu().double() - shift_XHTD
    strength_MHTP = response_MXHTD.abs().mean(1).unflatten(-1, (both.joined, -1)).sum(-2)
    if len(strength_MHTP) < both.joined:
        return None
    strongest_JHTP = strength_MHTP.topk(both.joined, dim=0).indices
    rows_JHTP = rows_GM[groups_HTD[..., : strongest_JHTP.shape[-1]], strongest_JHTP].sort(0).values
    rows_HTD = rows_JHTP.permute(1, 2, 0, 3).flatten(2)
    scale_HTD, shift_HTD = torch.ones_like(shift_XHTD[0]), torch.zeros_like(shift_XHTD[0])
    if both.joined == 1:
        scale_HTD, shift_HTD = response_MXHTD[:, 0].gather(0, strongest_JHTP)[0], shift_XHTD[0]
    weight, bias = piece.layer.weight, piece.layer.bias
    side = Side(weight=weight, bias=bias, rows_HTD=rows_HTD, scale_HTD=scale_HTD, shift_HTD=shift_HTD)
    return side if _holds(side, piece, heads, both, zeros.device) else None


def _holds(side: Side, piece: Subprogram, heads: HeadPlaces, both: BothHeads, where: torch.device) -> bool:
    """Check on random numbers that a map of the layer's rows maps the heads' dimensions alike."""
    generator = torch.Generator().manual_seed(0)
    heads_apart, dims = len(side.rows_HTD) // both.shared, side.rows_HTD.shape[2]
    map_HDD = torch.randn(heads_apart, dims, dims, generator=generator, dtype=torch.float64)
    if both.joined == 2:
        real_HP, other_HP = map_HDD[:, 0].chunk(2, dim=1)
        blocks = ((real_HP, -other_HP), (other_HP, real_HP))
        map_HDD = torch.cat([torch.cat([each.diag_embed() for each in line], dim=2) for line in blocks], dim=1)
    map_HDD = map_HDD.repeat_interleave(both.shared, dim=0)
    rows_HTD, map_HTDD, added_HTD = side.on_rows(map_HDD, torch.arange(dims).expand(len(map_HDD), -1))
    example = torch.randn(piece.sizes, generator=generator, dtype=torch.float64)
    mixed = example.movedim(piece.row_axis, -1).clone()
    mixed[..., rows_HTD] = torch.einsum("htrd,...htd->...htr", map_HTDD, mixed[..., rows_HTD]) + added_HTD
    after, before = (
        heads.of_one(piece(each.to(where))).cpu().double() for each in (mixed.movedim(-1, piece.row_axis), example)
    )
    expected = torch.einsum("hrd,xhtd->xhtr", map_HDD, before)
    return bool((after - expected).norm() < EXACT * expected.norm())
