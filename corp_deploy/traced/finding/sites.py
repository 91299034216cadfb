"""Sites of a program: its removable groups of elements with the same uses, with names, kinds and parts."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, fx

from corp_deploy.traced.programs.folding import is_mean_weight
from corp_deploy.traced.programs.program import RUN, SAME, SHAPED, Program, module_of, operation
from corp_deploy.traced.programs.readers import CONV2D, LINEAR, group_count
from corp_deploy.traced.programs.threads import one_thread

from .flow import Flow, Role, Use, find_holders, find_stuck
from .labels import LabelTensor, compact
from .product import count_node_macs
from .site_groups import FixedElements, Index, Kind, SiteGroups, Span
from .walk import walk_program

_PLAIN = SAME | SHAPED | RUN | {"batch_norm", "pad", "constant_pad_nd", "avg_pool2d", "adaptive_avg_pool2d", "mean"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AlikeGroups:
    """Groups `group_G` that have the same uses, with the index [groups, places] of each into the labels of each use."""

    uses: tuple[Use, ...]
    index: tuple[Index, ...]
    group_G: Tensor


def _alike_groups(flow: Flow, units: Tensor) -> Iterator[_AlikeGroups]:
    """Yield the groups of the mask `units` [labels], alike ones together, sorted by first use; writes come first."""
    uses = sorted(flow.every_use, key=lambda use: (use.role != "writes") + 2 * (not use.is_of_constant))
    groups_of, numbers_of, places_of = list[Index](), list[Index](), list[Index]()
    for number, use in enumerate(uses):
        groups = flow.groups.of(use.labels.reshape(-1))
        at = torch.nonzero((groups >= 0) & units[groups.clamp(min=0)])[:, 0]
        groups_of.append(groups[at].numpy())
        numbers_of.append(np.full(len(at), number))
        places_of.append(at.numpy())
    if not any(map(len, places_of)):
        return
    groups_U, numbers_U, places_U = map(np.concatenate, (groups_of, numbers_of, places_of))
    order_U = np.argsort(groups_U, kind="stable")  # uses and places are sorted already
    groups_U, numbers_U, places_U = groups_U[order_U], numbers_U[order_U], places_U[order_U]
    starts = np.flatnonzero(np.diff(groups_U, prepend=-1))
    # Groups are alike if each use has them equally often; equal sums of a random number for each use show that.
    drawn = np.random.default_rng(0).integers(0, 2**63, len(uses), dtype=np.uint64)
    _, alike_G = np.unique(np.add.reduceat(drawn[numbers_U], starts), return_inverse=True)
    count_G = np.diff(starts, append=len(groups_U))
    found = list[Index]()
    for members in np.split(np.argsort(alike_G, kind="stable"), np.flatnonzero(np.diff(np.sort(alike_G))) + 1):
        first_G = starts[members][np.argsort(places_U[starts[members]])]  # no two groups share a place
        found.append(first_G[:, None] + np.arange(count_G[members[0]]))
    for at_GM in sorted(found, key=lambda each: (numbers_U[each[0, 0]], places_U[each[0, 0]])):
        numbers_M = numbers_U[at_GM[0]]
        yield _AlikeGroups(
            uses=tuple(uses[number] for number in np.unique(numbers_M)),
            index=tuple(places_U[at_GM[:, numbers_M == number]] for number in np.unique(numbers_M)),
            group_G=torch.from_numpy(groups_U[at_GM[:, 0]]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundSites:
    """A program's walk, its sites in order, the written elements that stay, and multiply-adds of one input by node."""

    program: Program
    flow: Flow
    sites: tuple[SiteGroups, ...]
    stays: tuple[FixedElements, ...]
    costs: Mapping[fx.Node, int]


@one_thread()
def find_sites(program: Program, *, keeps_all: bool = False) -> FoundSites:
    """Find all sites of a program, with weights or on meta; with `keeps_all` those whose groups can be reordered."""
    flow = walk_program(program, keeps_all=keeps_all)
    units, parts, met = _removable(flow), _parts(flow), _met(flow)
    costs = {node: count_node_macs(node) for node in program.nodes if node.op == "call_function"}
    return FoundSites(
        program=program,
        flow=flow,
        sites=tuple(_number_equal_keys(_site(flow, met, parts, each) for each in _alike_groups(flow, units))),
        stays=tuple(_fixed_elements(flow, units)),
        costs=costs,
    )


def _of(flow: Flow, labels: Tensor) -> Tensor:
    groups = flow.groups.of(labels.reshape(-1))
    return groups[groups >= 0]


def _removable(flow: Flow) -> Tensor:
    """Return the mask [labels] of groups that are written and read, can be removed, and hold no others."""
    written, read = (torch.zeros(flow.groups.count, dtype=torch.bool) for _ in range(2))
    for use in flow.every_use:
        if use.role != "between":
            (written if use.role == "writes" else read)[_of(flow, use.labels)] = True
    return written & read & ~find_stuck(flow) & ~find_holders(flow)


Met = Mapping[str, Tensor]
"""Masks [labels] of labels that attention weights sum up, that meet in products and in sums, by field of Flow."""


def _met(flow: Flow) -> Met:
    met = {}
    for how, among in (("summed", flow.summed), ("multiplied", flow.multiplied), ("added", flow.added)):
        met[how] = torch.zeros(flow.groups.count, dtype=torch.bool)
        for labels in among:
            met[how][_of(flow, compact(labels))] = True
    return met


def _site(flow: Flow, met: Met, parts: Tensor, each: _AlikeGroups) -> SiteGroups:
    spans: dict[Role, dict[tuple[str, tuple[int, ...], str], Span]] = defaultdict(dict)
    for use, index_GM in zip(each.uses, each.index, strict=True):
        reader = "" if use.is_of_constant else use.node.name
        span = Span(name=use.name, axes=use.axes, index_GM=index_GM, reader=reader)
        spans[use.role].setdefault((use.name, use.axes, reader), span)
    part_of_groups = parts[each.group_G].tolist()
    number = {part: place for place, part in enumerate(dict.fromkeys(part_of_groups))}
    return SiteGroups(
        name=common_path(list(dict.fromkeys(use.node for use in each.uses))),
        kind=_kind(flow, met, each),
        size=len(each.group_G),
        writers=tuple(spans["writes"].values()),
        readers=tuple(spans["reads"].values()),
        between=tuple(spans["between"].values()),
        listening=(*spans["sums"].values(), *spans["pairs"].values()),
        part_G=None if len(number) == 1 else np.array([number[part] for part in part_of_groups]),
    )


def _kind(flow: Flow, met: Met, each: _AlikeGroups) -> Kind:
    group = each.group_G[0]
    if any(use.role == "pairs" for use in each.uses):
        return "queries and keys"
    if met["summed"][group]:
        return "values"
    ranks = {use: len(flow.program.tensor(use.name).shape) for use in each.uses if use.role == "writes"}
    rows = sum(index.shape[1] for use, index in zip(each.uses, each.index, strict=True) if ranks.get(use, 0) > 1)
    if rows > 1 and met["multiplied"][group]:
        return "gated channels"
    if sum(rank > 1 for rank in ranks.values()) > 1 and met["added"][group]:
        return "stream"
    if max(ranks.values()) < 3 or _is_pointwise(flow, each):
        return "channels"
    is_activated = any(_is_activated(use.node) for use in each.uses if use.role == "sums")
    return "convolution channels" if is_activated else "stream"


def _is_pointwise(flow: Flow, each: _AlikeGroups) -> bool:
    """Return whether a group's weights are linear or 1x1 and ungrouped, and its sums read whole activated maps."""
    for use in each.uses:
        if use.role in ("writes", "reads", "between"):
            if flow.program.tensor(use.name).shape[2:].numel() > 1 or _is_grouped(use.node):
                return False
        else:
            # A layer that reads one place of each map is a squeeze, unless it is a norm's mean over channels.
            source, weight = use.node.all_input_nodes[:2]
            is_pooled = source.meta["val"].shape[2:].numel() == 1 and not is_mean_weight(str(weight.target))
            if is_pooled or not _is_activated(use.node):
                return False
    return True


def _is_grouped(node: fx.Node) -> bool:
    return node.target is CONV2D and group_count(node) > 1


def _is_activated(reader: fx.Node) -> bool:
    """Check that not only moves, pooling, batch norm, scaling and grouped convolutions follow the layer before it."""
    node = reader.all_input_nodes[0]
    while (
        operation(node) in _PLAIN
        or (operation(node) == "mul" and all(each.op == "get_attr" for each in node.all_input_nodes[1:]))
        or _is_grouped(node)
    ):
        node = node.all_input_nodes[0]
    return node.target not in (LINEAR, CONV2D)


def _parts(flow: Flow) -> Tensor:
    """Return the part of each label: the label that holds it, as a head does, else the number of its line, else -1.

    Lines run along the last labelled axis of the first tensor whose labels vary along several axes.
    """
    part = torch.full((flow.groups.count,), -1)
    for outer, inner in flow.held_groups():
        new = part[inner] < 0
        part[inner[new]] = outer[new]
    for value in flow.values.values():
        if isinstance(value, LabelTensor) and value.labels is not None and len(value.dims) > 1:
            small = compact(value.labels).movedim(value.dims[-1], -1)
            groups = small.reshape(-1, small.shape[-1]).flip(0).long()
            lines = torch.arange(len(groups)).flip(0)[:, None].expand(groups.shape)
            new = (groups >= 0) & (part[groups.clamp(min=0)] < 0)
            part[groups[new]] = lines[new]
    return part


def common_path(nodes: Sequence[fx.Node]) -> str:
    """Return the path of the innermost module that all nodes are called in, or the first node's if they share none."""
    paths = [path.split(".") for path in (module_of(node)[0] for node in nodes) if path]
    common = [] if not paths else [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    return ".".join(common or (paths[0] if paths else [nodes[0].name]))


def _number_equal_keys(sites: Iterator[SiteGroups]) -> Iterator[SiteGroups]:
    count: Counter[str] = Counter()
    for site in sites:
        count[site.key] += 1
        yield site if count[site.key] == 1 else replace(site, name=f"{site.name}#{count[site.key]}")


def _fixed_elements(flow: Flow, units: Tensor) -> Iterator[FixedElements]:
    holds, written = find_holders(flow), dict[str, Tensor]()
    for use in flow.every_use:
        if use.role == "writes" and len(flow.program.tensor(use.name).shape) > 1:
            written.setdefault(use.name, _of(flow, use.labels))
    for name, groups in written.items():
        stays = groups[~units[groups]]
        if len(stays):
            reasons = flow.groups.reason_of(stays)
            why = "it goes with its head or part" if bool(holds[stays].any()) else "nothing reads it"
            reason = flow.groups.reasons[int(reasons[reasons > 0][0])] if bool(reasons.any()) else why
            yield FixedElements(name=name, count=len(stays), reason=reason)
