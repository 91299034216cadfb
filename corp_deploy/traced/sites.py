"""The sites of a program: its removable groups, sorted by where they stand, with names and kinds for people."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, fx

from .choice import holders, stuck
from .cost import macs
from .flow import Flow, Role
from .labels import Marks, compact
from .places import Alike, alike
from .program import Program, module_of
from .site import Index, Kind, Site, Span, Stay
from .walk import walked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """`sites` in order of the program, what `stays` and why, ops that are `unknown` with how often they were met,
    multiply-adds of one input and those of what can be removed.
    """

    program: Program
    flow: Flow
    sites: tuple[Site, ...]
    stays: tuple[Stay, ...]
    unknown: dict[str, int]
    macs: int
    macs_within: int


def find(program: Program) -> Found:
    """All sites of a program, with weights or without."""
    flow = walked(program)
    units = _units(flow)
    parts = _parts(flow)
    total, within = _macs(program, flow, units)
    return Found(
        program=program,
        flow=flow,
        sites=tuple(_named(_site(flow, parts, each) for each in alike(flow, units))),
        stays=tuple(_stays(flow, units)),
        unknown=dict(flow.unknown),
        macs=total,
        macs_within=within,
    )


def _of(flow: Flow, labels: Tensor) -> Tensor:
    """The groups of those labels that aren't fixed."""
    groups = flow.groups.of(labels.reshape(-1)).long()
    return groups[groups >= 0]


def _units(flow: Flow) -> Tensor:
    """Which labels name a group that can be removed: written, and read or multiplied, and nothing holds on to it."""
    written, read = (torch.zeros(flow.groups.count, dtype=torch.bool) for _ in range(2))
    for use in flow.every_use:
        if use.role != "between":
            (written if use.role == "writes" else read)[_of(flow, use.labels)] = True
    return written & read & ~stuck(flow) & ~holders(flow)


def _site(flow: Flow, parts: Tensor, each: Alike) -> Site:
    spans: dict[Role, dict[tuple[str, tuple[int, ...], str], Span]] = defaultdict(dict)
    for use, index_GM in zip(each.uses, each.index, strict=True):
        reader = "" if use.is_of_constant else use.node.name
        span = Span(name=use.name, axes=use.axes, index_GM=index_GM, reader=reader)
        spans[use.role].setdefault((use.name, use.axes, reader), span)
    nodes = list(dict.fromkeys(use.node for use in each.uses))
    return Site(
        name=_path(nodes),
        kind=_kind(flow, each),
        size=len(each.group_G),
        writers=tuple(spans["writes"].values()),
        readers=tuple(spans["reads"].values()),
        between=tuple(spans["between"].values()),
        listening=(*spans["sums"].values(), *spans["pairs"].values()),
        part_G=_numbered(parts[each.group_G].tolist()),
        lumps=next((why for labels, why in flow.lumps if _is_among(flow, labels, each.group_G)), ""),
        macs=sum(macs(node) for node in nodes) // len(each.group_G),
    )


def _is_among(flow: Flow, labels: Tensor, group_G: Tensor) -> bool:
    """Whether the first group is among labels."""
    return bool((flow.groups.of(compact(labels)) == group_G[0]).any())


def _kind(flow: Flow, each: Alike) -> Kind:
    def meets(labels: Sequence[Tensor]) -> bool:
        return any(_is_among(flow, every, each.group_G) for every in labels)

    if any(use.role == "pairs" for use in each.uses):
        return "queries and keys"
    if meets(flow.summed):
        return "values"
    ranks = {use: len(flow.program.tensor(use.name).shape) for use in each.uses if use.role == "writes"}
    rows = sum(index.shape[1] for use, index in zip(each.uses, each.index, strict=True) if ranks.get(use, 0) > 1)
    if rows > 1 and meets(flow.multiplied):
        return "gated channels"
    if sum(rank > 1 for rank in ranks.values()) > 1 and meets(flow.added):
        return "stream"
    return "convolution channels" if max(ranks.values()) > 2 else "channels"


def _parts(flow: Flow) -> Tensor:
    """The part [labels] that each group is of: what holds it, as a head does; else its line along the last axis of the
    first tensor that has several. -1 without either.
    """
    part = torch.full((flow.groups.count,), -1)
    for outer, inner in flow.held():
        new = part[inner] < 0
        part[inner[new]] = outer[new]
    for value in flow.values.values():
        if isinstance(value, Marks) and value.labels is not None and len(value.dims) > 1:
            small = compact(value.labels).movedim(value.dims[-1], -1)
            groups = small.reshape(-1, small.shape[-1]).flip(0).long()
            lines = torch.arange(len(groups)).flip(0)[:, None].expand(groups.shape)
            new = (groups >= 0) & (part[groups.clamp(min=0)] < 0)
            part[groups[new]] = lines[new]
    return part


def _numbered(parts: list[int]) -> Index | None:
    """In order of the groups; None where all are of one."""
    number = {part: place for place, part in enumerate(dict.fromkeys(parts))}
    return np.array([number[part] for part in parts]) if len(number) > 1 else None


def _path(nodes: Sequence[fx.Node]) -> str:
    """The innermost module that all are called in; of those that share none, the first."""
    paths = [path.split(".") for path in (module_of(node)[0] for node in nodes) if path]
    common = [] if not paths else [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    return ".".join(common or (paths[0] if paths else [nodes[0].name]))


def _named(sites: Iterator[Site]) -> Iterator[Site]:
    """Of several that share a path and a kind, each has a name."""
    count: Counter[str] = Counter()
    for site in sites:
        count[site.key] += 1
        yield site if count[site.key] == 1 else replace(site, name=f"{site.name}#{count[site.key]}")


def _stays(flow: Flow, units: Tensor) -> Iterator[Stay]:
    """What is written and stays, by parameter."""
    holds, written = holders(flow), dict[str, Tensor]()
    for use in flow.every_use:
        if use.role == "writes" and len(flow.program.tensor(use.name).shape) > 1:
            written.setdefault(use.name, _of(flow, use.labels))
    for name, groups in written.items():
        stays = groups[~units[groups]]
        if len(stays):
            reasons = flow.groups.reason_of(stays)
            held = "it goes with the head or part that it is of" if bool(holds[stays].any()) else "nothing reads it"
            said = flow.groups.reasons[int(reasons[reasons > 0][0])] if bool(reasons.any()) else held
            yield Stay(name=name, count=len(stays), reason=said)


def _macs(program: Program, flow: Flow, units: Tensor) -> tuple[int, int]:
    """All multiply-adds, and those that go when all that can be removed is: by the share of rows or columns of each."""
    share: dict[fx.Node, float] = defaultdict(float)
    for use in flow.every_use:
        share[use.node] = max(share[use.node], float(units[_of(flow, use.labels)].sum() / use.labels.numel()))
    of_node = {node: macs(node) for node in program.nodes if node.op == "call_function"}
    return sum(of_node.values()), round(sum(count * share[node] for node, count in of_node.items()))
