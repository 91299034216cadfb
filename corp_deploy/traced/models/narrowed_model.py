"""Narrowed models: new modules without the removed groups, proved against the dense one, and rebuilt from records."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from corp_deploy.traced.finding.site_groups import Index, SiteGroups, Span
from corp_deploy.traced.narrowing.proof import NarrowedProgram, narrow, prove
from corp_deploy.traced.programs.exported import set_device_
from corp_deploy.traced.programs.readers import remove_biases_, vocabulary_sizes
from corp_deploy.traced.programs.steady import NotFinite
from ground.errors import BadInput

from .array_inputs import build_random_batch
from .module import (
    EXAMPLES,
    KeptGroups,
    TracedModule,
    Tracing,
    device_of,
    facts_of,
    merging_module,
    narrowed_module,
    traced_state,
    tracing,
)
from .offered import sites_by_name, values_beside, whole_removal_of

VERSIONS = ("torch", "timm")
"""The packages that build and trace models, whose versions are recorded."""


def prove_kept(model: nn.Module, kept: Mapping[str, Index]) -> tuple[dict[str, Index], dict[str, str]]:
    """Prove on random inputs that sites can keep these groups; return by name the groups, and why others can't.

    Raises BadInput for a model that isn't deterministic, or that gives NaN on inputs within 0 and 1 too.
    """
    folded_to_constant = {name: each for name, each in kept.items() if not len(each)}
    own, rest = _without_folded(model, kept)
    names = {groups.key: name for name, groups in sites_by_name(own).items()}
    by_key, noise = _by_key(own, rest), _random_inputs(model, own)
    try:
        result = prove(own.analysis, by_key, noise)
    except NotFinite:  # logarithms and roots need positive numbers, and pixels are often within 0 and 1
        result = prove(own.analysis, by_key, [each.sigmoid() if each.is_floating_point() else each for each in noise])
    own.proved[:] = [result]
    return folded_to_constant | {names[key]: np.asarray(each) for key, each in result.kept.items()}, {
        names[key]: reason for key, reason in result.unreduced.items()
    }


def _without_folded(model: nn.Module, kept: Mapping[str, Index]) -> tuple[Tracing, dict[str, Index]]:
    """Return the tracing without sites that keep nothing, and the kept groups of the other sites.

    Raises BadInput for a site that can't be removed as a whole.
    """
    own, named = tracing(model), sites_by_name(tracing(model))
    empty = {name: whole_removal_of(own, named[name], name) for name, each in kept.items() if not len(each)}
    beside = values_beside(own, named) if None in empty.values() else {}
    for name, place in empty.items():
        if place is None and empty.get(beside.get(name, "")) is None:
            raise BadInput(
                f"{name}: it keeps nothing, but can't be removed completely; expected at least one of its groups"
            )
    places = tuple(each for each in empty.values() if each is not None)
    if places:
        own = own.without(places, _random_inputs(model, own))
        named = sites_by_name(own)
    return own, {name: each for name, each in kept.items() if len(each) and name in named}


def _random_inputs(model: nn.Module, own: Tracing) -> list[Tensor]:
    return build_random_batch(facts_of(model).spec.ports, vocabulary_sizes(own.program), EXAMPLES, device_of(model))


def _by_key(own: Tracing, kept: Mapping[str, Index]) -> dict[str, Index]:
    return {groups.key: kept[name] for name, groups in sites_by_name(own).items() if name in kept}


def narrow_model(model: nn.Module, kept: Mapping[str, Index], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the model with only the kept groups of these sites; `tensors` of its unnarrowed sizes replace weights."""
    own, rest = _without_folded(model, kept)
    result = _narrow(own, rest)
    emptied = {name for name, each in own.program.graph.named_parameters() if not each.numel()}
    result.set_({name: each for name, each in tensors.items() if name not in emptied})
    graph = result.module
    remove_biases_(graph, [name for name in _added(graph, own) if not bool(graph.get_parameter(name).any())])
    return _module(model, graph, kept, tuple(_added(graph, own)))


def at_widths(model: nn.Module, widths: Mapping[str, int]) -> nn.Module:
    """Return the model with sites at these widths, of the first groups of each part, without any repair.

    Raises BadInput if a site can't be as narrow.
    """
    own, sites = tracing(model), sites_by_name(tracing(model))
    kept = {name: first_groups(sites[name], width) for name, width in widths.items()}
    new, unreduced = with_groups(model, kept, own.added)
    for name in kept:
        if reason := unreduced.get(sites[name].key):
            raise BadInput(f"{name}: it can't be {widths[name]} wide: {reason}; give a budget of --macs")
    return new


def first_groups(site: SiteGroups, width: int, *, parts: int | None = None) -> Index:
    """Return the first groups of a site for a width, equally many of each part, or of the first `parts`."""
    part_G = np.zeros(site.size, dtype=np.int64) if site.part_G is None else site.part_G
    parts = site.parts if parts is None else parts
    return np.sort(np.concatenate([np.flatnonzero(part_G == part)[: width // parts] for part in range(parts)]))


def with_groups(
    model: nn.Module, kept: Mapping[str, Index], biases: tuple[str, ...]
) -> tuple[nn.Module, Mapping[str, str]]:
    """Return the model with these groups of its sites, unrepaired, and reasons why sites stayed whole, by key.

    `biases`: the added biases that it keeps.
    """
    own, rest = _without_folded(model, kept)
    result = narrow(own.analysis, _by_key(own, rest))
    remove_biases_(result.module, [name for name in _added(result.module, own) if name not in biases])
    where = device_of(model)
    set_device_(result.module, torch.device("cpu") if where.type == "meta" else where)
    return _module(model, result.module, kept, biases), result.unreduced


def _narrow(own: Tracing, kept: Mapping[str, Index]) -> NarrowedProgram:
    chosen = _by_key(own, kept)
    last = own.proved.pop() if own.proved else None
    if last is None or {key: list(each) for key, each in last.kept.items()} != {
        key: list(each) for key, each in chosen.items()
    }:
        last = narrow(own.analysis, chosen)
    assert not last.unreduced.keys() & chosen.keys(), last.unreduced
    return last


def _added(graph: fx.GraphModule, own: Tracing) -> list[str]:
    return [name for name, _ in graph.named_parameters() if name in own.added]


def _module(model: nn.Module, graph: fx.GraphModule, kept: Mapping[str, Index], biases: tuple[str, ...]) -> nn.Module:
    state = traced_state(model)
    new = narrowed_module(graph, state.plain.__name__, facts_of(model), _joined(model, kept, biases))
    return (new if state.merging is None else merging_module(new, state.merging)).eval().requires_grad_(False)


def _joined(model: nn.Module, kept: Mapping[str, Index], biases: tuple[str, ...]) -> KeptGroups:
    own, before = tracing(model), traced_state(model).cut
    groups = sites_by_name(own)
    if before is None:
        sizes = {name: each.size for name, each in groups.items()}
        digest, any_batch = digest_of(own), own.program.any_batch
        return KeptGroups(sizes=sizes, kept=dict(kept), biases=biases, digest=digest, any_batch=any_batch)
    before_groups = {name: before.kept.get(name, np.arange(size)) for name, size in before.sizes.items()}
    left = {name: each for name, each in before_groups.items() if len(each)}
    if any(name not in groups or groups[name].size != len(each) for name, each in left.items()):
        raise BadInput("sites of the reduced model are not those of the dense one any more; reduce the dense model")
    again = {name: before_groups[name][each] for name, each in kept.items()}
    return replace(before, kept={**before.kept, **again}, biases=(*before.biases, *biases))


def digest_of(own: Tracing) -> str:
    """Return the digest of the table of all sites: their names, and the elements of parameters in each group."""
    table = [
        [name, groups.kind, groups.size, [_line(span) for span in groups.spans]]
        for name, groups in sites_by_name(own).items()
    ]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def _line(span: Span) -> list[Any]:
    index = np.ascontiguousarray(span.index_GM, dtype="<i8")
    return [span.name, list(span.axes), list(index.shape), hashlib.sha256(index.tobytes()).hexdigest()]


def program_record(model: nn.Module) -> dict[str, Any] | None:
    """Return `digest`, `biases` and `versions` of a narrowed program; None for a dense or untraced model."""
    cut = traced_state(model).cut if isinstance(model, TracedModule) else None
    if cut is None:
        return None
    versions = {name: version(name) for name in VERSIONS}
    return {"digest": cut.digest, "biases": list(cut.biases), "versions": versions}


def sites_record(model: TracedModule) -> dict[str, Any]:
    """Return, by site, `groups`, their number in the dense model, and `kept`, those left, if it was narrowed."""
    cut = traced_state(model).cut
    sizes = {name: groups.size for name, groups in sites_by_name(tracing(model)).items()} if cut is None else cut.sizes
    kept = {} if cut is None else cut.kept
    return {
        name: {"groups": size} | ({"kept": kept[name].tolist()} if name in kept else {}) for name, size in sizes.items()
    }


def rebuild_narrowed(
    model: TracedModule,
    written_sizes: Mapping[str, int],
    written_kept: Mapping[str, Sequence[int]],
    program: Mapping[str, Any],
    *,
    where: str,
) -> nn.Module:
    """Narrow a dense model as a record says, its weights yet to be set.

    Raises BadInput if its program differs from the recorded one, or if the recorded groups can't be kept.
    """
    if digest_of(tracing(model)) != program["digest"]:
        # A fresh model may share weights between names; the recorded one had one for each name before its trace.
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    own = tracing(model)
    if digest_of(own) != program["digest"]:
        was, now = program["versions"], {name: version(name) for name in VERSIONS}
        reason, remedy = "now gives another program: its code or arguments changed", "give those that it was made with"
        if was != now:
            reason = f"was written with {_words(was)} and gives another program with {_words(now)}"
            remedy = "load it with the versions that it was written with"
        raise BadInput(
            f"{where}: the model {reason}, so the kept channels can't be found; {remedy}, or reduce it again"
        )
    kept = {name: np.array(each, dtype=np.int64) for name, each in written_kept.items()}
    sizes = {name: groups.size for name, groups in sites_by_name(own).items()}
    if unknown := [name for name, size in written_sizes.items() if sizes.get(name) != size]:
        raise BadInput(f"{where}: no site {unknown[0]!r:.100} of that many groups; the file was edited, write it again")
    if odd := [name for name, each in kept.items() if not (np.diff(each, prepend=-1, append=sizes[name]) > 0).all()]:
        raise BadInput(
            f"{where}: {odd[0]!r:.100} keeps groups, expected rising numbers below {sizes[odd[0]]}; the file was "
            "edited, write it again"
        )
    if strange := [name for name in program["biases"] if name not in own.added]:
        raise BadInput(f"{where}: narrowing adds no bias {strange[0]!r:.100}; the file was edited, write it again")
    try:
        new, unreduced = with_groups(model, kept, tuple(program["biases"]))
    except BadInput as error:
        raise BadInput(f"{where}: {error}; the file was edited, write the model again") from None
    if unreduced:
        raise BadInput(f"{where}: {next(iter(unreduced.values()))}; the file was edited, write the model again")
    return new


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions.get(name, 'unknown')}" for name in VERSIONS)
