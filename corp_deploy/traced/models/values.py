"""Sites of values: the dimensions of heads that attention weights sum up.

Legend: H heads, V dimensions of a head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from corp_deploy.traced.finding.attentions import find_attentions
from corp_deploy.traced.finding.choice import find_head_groups
from corp_deploy.traced.finding.labels import LabelTensor, compact
from corp_deploy.traced.finding.moves import source_of_moves
from corp_deploy.traced.finding.site_groups import Index, SiteGroups
from corp_deploy.traced.programs.program import operation
from corp_deploy.traced.programs.readers import CalledLayer, layers

from .module import Tracing
from .sites import Site, SiteReader
from .units import Units, head_units

_SUMS = frozenset(["scaled_dot_product_attention", "matmul", "bmm", "einsum"])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedValues(Site):
    """The values of one attention, with the site's groups by head, `groups_HV`.

    `queries`: the width of a head's queries if that can equal the values'. `beside`: the name of the site of queries
    and keys, empty if they can't be narrowed. `queries_mixed`: the reason why they can't, if known.

    `rows`: the layer whose rows [H,V] make the values, if only moves stand between it, the sum by attention weights and
    the one layer that reads the result; then dimensions of a head may be mixed, else they are only selected.
    `with_heads`: returns, by site of queries and keys, the head of each group, or why no head can be removed.
    `units`: returns the heads as units that can be merged, or why none can.
    """

    kind: ClassVar[str] = "traced values"
    groups_HV: Tensor
    rows: CalledLayer | None
    rows_HV: Tensor
    queries: int | None
    beside: str
    queries_mixed: str
    with_heads: Callable[[], Mapping[str, Index] | str]
    units: Callable[[], Units | str]

    @property
    def tied(self) -> str:
        return "" if self.queries is None else self.beside

    @property
    def queries_gone(self) -> dict[str, Index]:
        """The kept groups (none) of the site of queries and keys when all values are removed."""
        return {} if self.queries is None else {self.beside: np.empty(0, dtype=np.int64)}

    def of_heads(self, kept_K: Tensor) -> Self:
        """Return the site with only the heads of these groups."""
        is_left_H = torch.isin(self.groups_HV, kept_K.cpu()).any(1)
        return replace(self, groups_HV=self.groups_HV[is_left_H], rows_HV=self.rows_HV[is_left_H])


def build_values(
    tracing: Tracing, named: Mapping[str, SiteGroups], own: Mapping[str, Any], *, has_queries: bool
) -> TracedValues:
    """Build the site from the fields that all sites have; `named` are all sites found."""
    groups, readings = own["groups"], own["readings"]
    part_G = torch.zeros(groups.size, dtype=torch.int64) if groups.part_G is None else torch.from_numpy(groups.part_G)
    groups_HV = part_G.argsort(stable=True).view(groups.parts, -1)
    writer = groups.writers[0]
    rows_HV = torch.from_numpy(writer.index_GM[:, 0])[groups_HV]
    is_one = len(readings) == writer.index_GM.shape[1] == readings[0].columns_GM.shape[1] == 1
    rows = _rows(tracing, groups, readings[0]) if is_one else None

    @cache
    def with_heads() -> Mapping[str, Index] | str:
        of_key = find_head_groups(tracing.analysis, groups)
        if isinstance(of_key, str):
            return of_key
        return {name: of_key[each.key] for name, each in named.items() if each.key in of_key}

    @cache
    def units() -> Units | str:
        others = find_head_groups(tracing.analysis, groups)
        span = next(each for each in groups.listening if each.name == readings[0].source)
        return others if isinstance(others, str) else head_units(tracing.analysis, groups, others, groups_HV, span)

    return TracedValues(
        **own,
        groups_HV=groups_HV,
        rows=rows,
        rows_HV=rows_HV,
        queries=None,
        beside="",
        queries_mixed="" if has_queries else _queries_mixed(tracing, readings[0]),
        with_heads=with_heads,
        units=units,
    )


def _queries_mixed(tracing: Tracing, reading: SiteReader) -> str:
    output, flow = source_of_moves(tracing.by_node[reading.source]), tracing.analysis.flow
    queries = next((each.queries for each in find_attentions(tracing.program) if each.output is output), None)
    marks = None if queries is None else flow.values.get(queries)
    if not isinstance(marks, LabelTensor) or marks.labels is None:
        return marks.why if isinstance(marks, LabelTensor) else ""
    groups = flow.groups.of(compact(marks.labels))
    joined = ((flow.groups.of(labels), why) for labels, why in flow.lumps)
    return next((why for labels, why in joined if bool(torch.isin(labels, groups).any())), "")


def _rows(tracing: Tracing, groups: SiteGroups, reading: SiteReader) -> CalledLayer | None:
    product = source_of_moves(tracing.by_node[reading.source])
    if operation(product) not in _SUMS:
        return None
    writers = {layer.node: layer for layer in layers(tracing.program)}
    touched = {span.name for span in groups.spans}
    rows = (writers.get(source_of_moves(node)) for node in product.all_input_nodes)
    return next((each for each in rows if each and touched <= {each.weight, each.bias, reading.weight}), None)
