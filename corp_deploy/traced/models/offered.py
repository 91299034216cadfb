"""The sites that a model offers, built from those found in its program, and the refused ones with their reasons."""

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from corp_deploy.traced.finding.flow import site_labels
from corp_deploy.traced.finding.labels import LabelTensor, compact
from corp_deploy.traced.finding.site_groups import SiteGroups, Span
from corp_deploy.traced.narrowing.whole_removal import WholeRemoval, find_whole_removal
from corp_deploy.traced.programs.attention_masks import find_attention_output
from corp_deploy.traced.programs.folding import is_mean_weight
from corp_deploy.traced.programs.program import module_of, named_arguments, operation, sizes_at_one
from corp_deploy.traced.programs.readers import CONV2D, LINEAR, batch_norm_gain, can_be_observed

from .module import Tracing, facts_of, tracing
from .pairs import TracedPairs, build_pairs
from .segments import ProgramSegment
from .sites import Refusal, Site, SiteReader, Sites, TracedChannels, TracedConvolutions, TracedStream
from .values import TracedValues, build_values

_CLASSES: dict[str, type[Site]] = {
    "channels": TracedChannels,
    "gated channels": TracedChannels,
    "convolution channels": TracedConvolutions,
    "values": TracedValues,
    "queries and keys": TracedPairs,
    "stream": TracedStream,
}
_SUFFIXES = {"queries and keys": ".qk", "values": ".v", "stream": ".stream"}


def traced_sites(tracing: Tracing, chosen: Container[str] | None = None) -> Sites:
    """Return the sites of the names `chosen`, None for all, and the refused ones, in order of the program."""
    every, refused, named = list[Site](), list[Refusal](), sites_by_name(tracing)
    beside = values_beside(tracing, named)
    for name, groups in named.items():
        site = _site(tracing, named, beside, name)
        if isinstance(site, Site):
            every.append(site)
        else:
            refused.append(Refusal(name=name, reason=site, kind=_CLASSES[groups.kind].kind))
    return Sites(
        every=tuple(each for each in _with_queries(every, beside) if chosen is None or each.name in chosen),
        refused=tuple(each for each in refused if chosen is None or each.name in chosen),
    )


def _with_queries(every: list[Site], beside: Mapping[str, str]) -> Iterator[Site]:
    """Yield the sites, those of values with the name and width of their heads' queries if those can be reduced too."""
    queries = {beside[each.name]: each for each in every if isinstance(each, TracedPairs) and each.name in beside}
    for each in every:
        if isinstance(each, TracedValues) and (own := queries.get(each.name)) is not None:
            each = replace(each, beside=own.name, queries=own.dims if own.tied else None)
        yield each


def values_beside(tracing: Tracing, named: Mapping[str, SiteGroups]) -> dict[str, str]:
    """Return, by site of queries and keys, the site of its attention's values, found by labels or else by module."""
    flow, found = tracing.analysis.flow, dict[str, str]()
    values = {name: groups for name, groups in named.items() if groups.kind == "values"}
    labels = {name: site_labels(flow, groups)[:, 0] for name, groups in values.items()}
    for name, groups in named.items():
        if groups.kind != "queries and keys":
            continue
        output = find_attention_output(tracing.by_node[groups.listening[0].reader])
        marks = None if output is None else flow.values.get(output)
        if isinstance(marks, LabelTensor) and marks.labels is not None:
            summed = flow.groups.of(compact(marks.labels))
            own = next((each for each, those in labels.items() if bool(torch.isin(those, summed).any())), None)
        else:
            own = next((each for each, those in values.items() if those.name == groups.name), None)
        if own is not None:
            found[name] = own
    return found


def _layer_after(tracing: Tracing, groups: SiteGroups, values: SiteGroups | None) -> str:
    """Return the name of the node of the layer that reads an attention's output; empty if there is none."""
    readers = () if values is None else (span.reader for span in values.listening)
    if hooked_reader := next((reader for reader in readers if reader in tracing.hooked[1]), ""):
        return hooked_reader
    node = find_attention_output(tracing.by_node[groups.listening[0].reader])
    while node is not None and node.target not in (LINEAR, CONV2D):
        node = next(iter(node.users)) if len(node.users) == 1 else None
    return "" if node is None else node.name


def sites_by_name(tracing: Tracing) -> dict[str, SiteGroups]:
    """Return the sites found by their public names: the path of their module and a suffix for their kind."""
    count: Counter[str] = Counter()
    named: dict[str, SiteGroups] = {}
    for groups in tracing.analysis.sites:
        path = groups.name.partition("#")[0] + _SUFFIXES.get(groups.kind, "")
        count[path] += 1
        named[path if count[path] == 1 else f"{path}#{count[path]}"] = groups
    return named


def _site(tracing: Tracing, named: Mapping[str, SiteGroups], beside: Mapping[str, str], name: str) -> Site | str:
    groups = named[name]
    kind = _CLASSES[groups.kind]
    if not tracing.program.any_batch:
        return "its program is for one batch size alone, so that no statistics can be taken"
    own: dict[str, Any] = {
        "name": name,
        "groups": groups,
        "program": tracing.program,
        "macs_now": tracing.shares.macs.alone[groups.key],
        "parameters_now": tracing.shares.parameters.alone[groups.key],
    }
    if kind is TracedPairs:
        values = named[beside[name]] if name in beside else None
        return build_pairs(tracing, own, _layer_after(tracing, groups, values))
    readings = list[SiteReader]()
    for span in groups.listening:
        reading = _reading(tracing, span)
        if isinstance(reading, str):
            return reading
        readings.append(reading)
    readings = _with_squeezes(tracing, groups, readings)
    if refusal := _refusal(tracing, groups, readings):
        return refusal
    own |= {"readings": tuple(readings), "whole_removal": whole_removal_of(tracing, groups, name)}
    if kind is TracedValues:
        return build_values(tracing, named, own, has_queries=name in beside.values())
    return kind(**own, multiple=tracing.multiple if kind is TracedChannels else 1)


def whole_removal_of(tracing: Tracing, groups: SiteGroups, name: str) -> WholeRemoval | None:
    """Return the layers around an MLP's channels or an attention's values if a constant can replace these."""
    if groups.kind not in ("channels", "gated channels", "values") or "#" in f"{name}{groups.name}":
        return None
    return find_whole_removal(tracing.program, groups)


def _with_squeezes(tracing: Tracing, groups: SiteGroups, readings: list[SiteReader]) -> list[SiteReader]:
    """Return the readers, those of a map's mean marked as squeezes if other layers read more than one place of maps."""
    readings = [replace(each, is_squeeze=is_mean_weight(each.weight)) for each in readings]
    shapes = [sizes_at_one(tracing.by_node[each.source]) for each in readings]
    counts = [math.prod(shape[2:]) if len(shape) == 4 else 0 for shape in shapes]
    places = [1 if each.is_squeeze else count for each, count in zip(readings, counts, strict=True)]
    if groups.kind == "stream" or max(places, default=0) <= 1:
        return readings
    return [replace(each, is_squeeze=count == 1) for each, count in zip(readings, places, strict=True)]


def _refusal(tracing: Tracing, groups: SiteGroups, readings: list[SiteReader]) -> str:
    """Return the reason why no repair of a site's readers is known, empty if one is."""
    if not readings:
        return "no layer with weights of its own reads it"
    for weight in dict.fromkeys(reading.weight for reading in readings):
        if not _is_alike([reading for reading in readings if reading.weight == weight], len(tracing.uses[weight])):
            return f"{weight} is used more than once, and not always for the same channels"
    read = {span.name for span in groups.readers}
    if other := sorted(read - {reading.weight for reading in readings}):
        return f"{other[0]} reads it otherwise than a linear layer or a convolution does"
    if uneven := [reading for reading in readings if not reading.portions]:
        return f"{uneven[0].name} reads some groups at more places than others"
    if groups.part_G is not None and len(set(np.bincount(groups.part_G).tolist())) > 1:
        return "its parts are of different sizes"
    return ""


def _is_alike(uses: list[SiteReader], count: int) -> bool:
    first, *others = uses
    same = all(np.array_equal(first.columns_GM, each.columns_GM) for each in others)
    return same and len(uses) == count and (not others or all(each.gain_O is None for each in uses))


def _reading(tracing: Tracing, span: Span) -> SiteReader | str:
    node = tracing.by_node[span.reader]
    path, source = module_of(node)[0] or "the model", tracing.by_node[span.name]
    if not can_be_observed(node, source):
        return f"{operation(node)} in {path} reads several maps of each image, of which no repair is known"
    layer = tracing.hooked[1].get(node.name)
    if layer is None:
        return f"{operation(node)} in {path} reads it, of which no repair is known"
    assert node.target in (LINEAR, CONV2D), node
    last = (source.meta["val"].dim() - 1,)
    if span.axes != (last if node.target is LINEAR else (1,)) or source is not node.args[0]:
        return f"{operation(node)} in {path} reads it along several axes, of which no repair is known"
    weight, bias = (str(named_arguments(node)[name].target) for name in ("weight", "bias"))
    distinct = len(np.unique(span.index_GM))
    assert distinct == span.index_GM.size, span
    return SiteReader(
        layer=layer,
        source=span.name,
        columns_GM=span.index_GM,
        weight=weight,
        bias=bias,
        gain_O=batch_norm_gain(tracing.program, node),
        is_biasless=bias in tracing.biasless,
        use=tracing.uses[weight].index(node.name),
        merge=tracing.merge_before(source.name),
    )


def sites_of(model: nn.Module) -> Sites:
    """Return the model's sites, or those that its user named."""
    own = tracing(model)
    own.offered[:] = own.offered or [traced_sites(own, facts_of(model).sites)]
    return own.offered[0]


def sites_by_segment(model: nn.Module) -> dict[ProgramSegment, tuple[str, ...]]:
    own = tracing(model)
    tensors = {
        name: {span.name for span in (*groups.writers, *groups.readers)} for name, groups in sites_by_name(own).items()
    }
    return {
        each: tuple(name for name in tensors if not tensors[name].isdisjoint(each.weights)) for each in own.segments
    }
