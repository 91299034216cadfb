"""The sites of a program: labels that are one, sorted by where they stand."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from .cost import macs
from .flow import Flow
from .holding import holders, stuck
from .labels import compact
from .marks import Marks
from .program import Program, module_of
from .site import Index, Kind, Site, Span, Stay
from .walk import walked

Key = tuple[Hashable, ...]


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
    table = _Table(flow, units)
    sites = _named([_site(flow, table, key, groups) for key, groups in table.by_places()])
    total, within = _macs(program, flow, units)
    return Found(
        program=program,
        flow=flow,
        sites=tuple(sites),
        stays=tuple(_stays(flow, units)),
        unknown=dict(flow.unknown),
        macs=total,
        macs_within=within,
    )


def _roots(flow: Flow, labels: Tensor) -> Tensor:
    return flow.groups.of(labels.reshape(-1)).long()


def _units(flow: Flow) -> Tensor:
    """Which labels name a group that can be removed: written, and read or multiplied, and nothing holds on to it."""
    written, read = (torch.zeros(flow.groups.count, dtype=torch.bool) for _ in range(2))
    for touch in flow.touches:
        if touch.role != "between":
            roots = _roots(flow, touch.labels)
            (written if touch.role == "writes" else read)[roots[roots >= 0]] = True
    for hearing in flow.heard:
        roots = _roots(flow, hearing.labels)
        read[roots[roots >= 0]] = True
    return written & read & ~stuck(flow) & ~holders(flow)


class _Table:
    """Where every group stands: rows of (group, place key, position)."""

    def __init__(self, flow: Flow, units: Tensor) -> None:
        self.flow = flow
        self.keys: list[Key] = []
        rows: list[Tensor] = []
        seen: dict[Key, int] = {}
        for key, labels in _places(flow):
            if key not in seen:
                seen[key] = len(self.keys)
                self.keys.append(key)
                roots = _roots(flow, labels)
                at = torch.nonzero((roots >= 0) & units[roots.clamp(min=0)])[:, 0]
                rows.append(torch.stack((roots[at], torch.full_like(at, seen[key]), at), 1))
        every = torch.cat(rows).numpy() if rows else np.empty((0, 3), dtype=np.int64)
        order = np.lexsort((every[:, 2], every[:, 1], every[:, 0]))
        self.rows = every[order]

    def by_places(self) -> Iterator[tuple[Key, list[Index]]]:
        """Groups that stand in the same places, in order of the first of those: the positions of each."""
        _, starts = np.unique(self.rows[:, 0], return_index=True)
        alike: dict[Key, list[Index]] = defaultdict(list)
        for rows in np.split(self.rows, starts[1:]):
            if len(rows):
                alike[tuple(rows[:, 1].tolist())].append(rows)
        for key, groups in sorted(alike.items(), key=lambda item: (min(item[0]), item[1][0][0, 2])):
            yield key, sorted(groups, key=lambda rows: tuple(rows[:, 2].tolist()))


def _places(flow: Flow) -> Iterator[tuple[Key, Tensor]]:
    order = {node: place for place, node in enumerate(flow.program.nodes)}
    touches = sorted(flow.touches, key=lambda each: (each.role != "writes", order[each.node]))
    for touch in touches:
        yield ("constant", touch.role, touch.constant, touch.axes, touch.node), touch.labels
    for hearing in flow.heard:
        yield ("node", hearing.is_bilinear, hearing.source, hearing.axes, hearing.reader), hearing.labels


def _site(flow: Flow, table: _Table, key: Key, groups: list[Index]) -> Site:
    rows = np.stack(groups)
    spans: dict[str, list[Span]] = defaultdict(list)
    nodes: list[fx.Node] = []
    seen: set[Key] = set()
    for number in dict.fromkeys(key):
        what, role, name, axes, node = table.keys[number]  # type: ignore[index]
        index_GM = rows[:, rows[0, :, 1] == number, 2]
        is_node = what == "node"
        place = (what, role, name, axes) if not is_node else (what, role, name, axes, node)
        if place in seen:
            nodes.append(node)
            continue
        seen.add(place)
        nodes.append(node)
        span = Span(
            name=name.name if is_node else name, axes=axes, index_GM=index_GM, reader=node.name if is_node else ""
        )
        spans["bilinear" if is_node and role else "heard" if is_node else role].append(span)
    roots = torch.from_numpy(rows[:, 0, 0])
    kind = _kind(flow, roots, spans, nodes)
    return Site(
        name=_path(nodes),
        kind=kind,
        size=len(rows),
        writers=tuple(spans["writes"]),
        readers=tuple(spans["reads"]),
        between=tuple(spans["between"]),
        listening=tuple(spans["heard"] + spans["bilinear"]),
        part_G=_parts(flow, roots),
        lumps=_lumps(flow, roots),
        macs=sum(macs(node) for node in dict.fromkeys(nodes)) // len(rows),
    )


def _among(flow: Flow, labels: Sequence[Tensor], roots: Tensor) -> bool:
    """Whether the first group is among labels."""
    return any(bool((_roots(flow, compact(each)) == roots[0]).any()) for each in labels)


def _kind(flow: Flow, roots: Tensor, spans: Mapping[str, list[Span]], nodes: Sequence[fx.Node]) -> Kind:
    if spans["bilinear"]:
        return "queries and keys"
    if _among(flow, flow.summed, roots):
        return "values"
    weights = {span.name for span in spans["writes"] if len(flow.program.tensor(span.name).shape) > 1}
    rows = sum(span.index_GM.shape[1] for span in spans["writes"] if span.name in weights)
    if rows > 1 and _among(flow, flow.multiplied, roots):
        return "gated channels"
    if len(weights) > 1 and _among(flow, flow.added, roots):
        return "stream"
    is_map = any(len(flow.program.tensor(name).shape) > 2 for name in weights)
    return "convolution channels" if is_map else "channels"


def _lumps(flow: Flow, roots: Tensor) -> str:
    whys = [why for labels, why in flow.lumps if bool((_roots(flow, labels) == roots[0]).any())]
    return whys[0] if whys else ""


def _parts(flow: Flow, roots: Tensor) -> Index | None:
    """By what holds the groups, as a head does; else by the axes in front of their own, where a tensor has such."""
    held: dict[int, int] = {}
    for outer, inner in flow.held():
        if bool((inner == roots[0]).any()):
            held = dict(zip(inner.tolist(), outer.tolist(), strict=True))
            break
    if not held:
        held = _outer(flow, roots)
    parts = [held.get(root, -1) for root in roots.tolist()]
    names = {part: place for place, part in enumerate(dict.fromkeys(parts))}
    return None if len(names) < 2 else np.array([names[part] for part in parts])


def _outer(flow: Flow, roots: Tensor) -> dict[int, int]:
    for value in flow.values.values():
        if not isinstance(value, Marks) or len(value.dims) < 2 or value.labels is None:
            continue
        small = flow.groups.of(compact(value.labels)).long()
        if not bool((small == roots[0]).any()):
            continue
        lines = small.reshape(-1, small.shape[value.dims[-1]] if value.dims[-1] == small.dim() - 1 else 1)
        return {root: line for line, row in reversed(list(enumerate(lines.tolist()))) for root in row}
    return {}


def _path(nodes: Sequence[fx.Node]) -> str:
    """The innermost module that all are called in; of those that share none, the first."""
    paths = [path.split(".") for path in (module_of(node)[0] for node in nodes) if path]
    if not paths:
        return nodes[0].name
    common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    return ".".join(common or paths[0])


def _named(sites: list[Site]) -> list[Site]:
    """Of several that share a path and a kind, each has a name."""
    from dataclasses import replace

    count: dict[tuple[str, str], int] = defaultdict(int)
    named = []
    for site in sites:
        place = site.name, site.kind
        count[place] += 1
        named.append(site if count[place] == 1 else replace(site, name=f"{site.name}#{count[place]}"))
    return named


def _stays(flow: Flow, units: Tensor) -> Iterator[Stay]:
    """What is written and stays, by parameter."""
    why: dict[int, str] = {}
    for labels, reason in flow.stays:
        for root in _roots(flow, labels).tolist():
            why.setdefault(root, reason)
    holds = holders(flow)
    seen: set[str] = set()
    for touch in flow.touches:
        if touch.role == "writes" and touch.constant not in seen and len(flow.program.tensor(touch.constant).shape) > 1:
            seen.add(touch.constant)
            roots = _roots(flow, touch.labels)
            stuck = roots[~units[roots]].tolist()
            if stuck:
                held = "it goes with the head or part that it is of" if bool(holds[stuck].any()) else "nothing reads it"
                reason = next((why[root] for root in stuck if root in why), held)
                yield Stay(name=touch.constant, count=len(stuck), reason=reason)


def _macs(program: Program, flow: Flow, units: Tensor) -> tuple[int, int]:
    """All multiply-adds, and those that go when all that can be removed is: by the share of rows or columns of each."""
    share: dict[fx.Node, float] = defaultdict(float)
    labelled = [(touch.node, touch.labels) for touch in flow.touches if touch.labels.numel()]
    labelled += [(hearing.reader, hearing.labels) for hearing in flow.heard]
    for node, labels in labelled:
        roots = _roots(flow, labels)
        share[node] = max(share[node], float(((roots >= 0) & units[roots.clamp(min=0)]).float().mean()))
    of_node = {node: macs(node) for node in program.nodes if node.op == "call_function"}
    return sum(of_node.values()), round(sum(count * share[node] for node, count in of_node.items()))
