"""Units of a traced site that can be merged, channels or whole heads: their rows, and the program up to their readers.

Legend: U units, V groups of a unit, X rows that write one in a tensor.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from corp_deploy.traced.finding.choice import removed_labels
from corp_deploy.traced.finding.cuts import input_free_nodes
from corp_deploy.traced.finding.site_groups import Index, SiteGroups, Span
from corp_deploy.traced.finding.sites import FoundSites
from corp_deploy.traced.programs.program import Program, find_reachable, number_at_one, operation, sizes_at_one
from corp_deploy.traced.programs.readers import replace_tensors
from corp_deploy.traced.programs.subprogram import evaluate_nodes

GATED = "folding takes means of rows, and the product of two means is not the mean of a gate's products"
EXACT = 1e-5
"""The relative error of float64 results from float32 constants."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """The part of a program between written rows and the nodes that layers read, `ends`.

    `changed`: all nodes that depend on the rows. `nodes`: those of them, and of constants, that lead to the ends.
    `entering`: the further inputs of these.
    """

    changed: frozenset[fx.Node]
    nodes: tuple[fx.Node, ...]
    entering: tuple[fx.Node, ...]
    ends: tuple[fx.Node, ...]

    @property
    def around(self) -> tuple[fx.Node, ...]:
        """The nodes that the region takes and gives."""
        return *self.entering, *self.ends


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """Units that can be merged: the groups of each, and by tensor the `rows` [U,X] that write each."""

    groups_UV: Tensor
    rows: Mapping[str, Tensor]
    region: Region

    def written(self, program: Program) -> Tensor:
        """Concatenate all rows that write each unit [U,...], float64."""
        parts = ((program.tensor(name).detach().double(), rows_UX) for name, rows_UX in self.rows.items())
        return torch.cat([tensor[rows_UX.to(tensor.device)].flatten(1) for tensor, rows_UX in parts], dim=1)


def _region(program: Program, names: Collection[str], sources: Collection[str]) -> Region:
    changed, constants = set[fx.Node](), input_free_nodes(program)
    for node in program.nodes:
        is_written = node.op == "get_attr" and str(node.target) in names
        if is_written or (number_at_one(node) is None and not changed.isdisjoint(node.all_input_nodes)):
            changed.add(node)
    ends = [node for node in program.nodes if node.name in sources]
    of_either = changed | constants

    def entering(node: fx.Node) -> list[fx.Node]:
        return node.all_input_nodes if node in of_either and operation(node) != "sym_size" else []

    every = find_reachable(ends, entering)
    inside = [node for node in program.nodes if node in every]
    return Region(
        changed=frozenset(changed),
        nodes=tuple(node for node in inside if node in of_either),
        entering=tuple(node for node in inside if node not in of_either),
        ends=tuple(ends),
    )


def channel_units(program: Program, groups: SiteGroups, sources: Sequence[str]) -> Units | str:
    """Return each channel as a unit, or the reason why none can be merged; `sources` are the nodes that layers read."""
    if groups.kind == "gated channels":
        return GATED
    if groups.between or any(span.axes != (0,) for span in groups.writers):
        return "the operations between its layers differ by channel, so that none can be merged"
    rows = {span.name: torch.from_numpy(span.index_GM) for span in groups.writers}
    region = _region(program, rows, sources)
    return Units(groups_UV=torch.arange(groups.size)[:, None], rows=rows, region=region)


def head_units(
    analysis: FoundSites, values: SiteGroups, others: Mapping[str, Index], groups_HV: Tensor, span: Span
) -> Units | str:
    """Return each head of an attention as a unit, or the reason why none can be merged."""
    assert values.part_G is not None, values.key
    rows = _rows_of_heads(analysis, {values.key: values.part_G, **others}, len(groups_HV))
    if rows is None:
        return "its heads are not written by rows of layers, so that heads can't be merged"
    region = _region(analysis.program, rows, [span.name])
    units = Units(groups_UV=groups_HV, rows=rows, region=region)
    if not _are_alike(analysis.program, units, span):
        return "the operations between its layers differ by head, so that none can be merged"
    return units


def _rows_of_heads(analysis: FoundSites, part_of: Mapping[str, Index], heads: int) -> dict[str, Tensor] | None:
    flow, lines = analysis.flow, dict[str, list[Tensor]]()
    written = {use.name: use for use in flow.every_use if use.role == "writes"}
    for head in range(heads):
        goes = removed_labels(analysis, {key: np.flatnonzero(part_G != head) for key, part_G in part_of.items()})
        for name, use in written.items():
            own = torch.nonzero(goes[flow.groups.of(use.labels).flatten()])[:, 0]
            if len(own) and use.axes != (0,):
                return None
            if len(own):
                lines.setdefault(name, []).append(own)
    if any(len(own) != heads or len({len(each) for each in own}) > 1 for own in lines.values()):
        return None
    return {name: torch.stack(own) for name, own in lines.items()}


def _are_alike(program: Program, units: Units, span: Span) -> bool:
    """Check on random numbers that exchanging the units' rows exchanges their results."""
    generator = torch.Generator().manual_seed(0)
    where = program.device
    entering = {}
    for node in units.region.entering:
        random = torch.randn(sizes_at_one(node), generator=generator, dtype=torch.float64)
        dtype = node.meta["val"].dtype
        entering[node] = (random if dtype.is_floating_point else torch.ones_like(random, dtype=dtype)).to(where)
    moved = {}
    for name, rows_UX in units.rows.items():
        moved[name] = program.tensor(name).detach().clone()
        moved[name][rows_UX.to(where)] = program.tensor(name).detach()[rows_UX.roll(1, 0).to(where)]
    nodes = [node for node in units.region.nodes if number_at_one(node) is None]
    (end,) = units.region.ends
    dense, other = (
        evaluate_nodes(each, nodes, {node: x.clone() for node, x in entering.items()}, torch.float64)[end]
        for each in (program, replace_tensors(program, moved))
    )
    columns_UK = torch.from_numpy(span.index_GM)[units.groups_UV].flatten(1).to(where)
    expected = dense.movedim(span.axes[0], -1)[..., columns_UK.roll(1, 0)]
    actual = other.movedim(span.axes[0], -1)[..., columns_UK]
    return bool((actual - expected).norm() <= EXACT * expected.norm())
