"""The order in which a closed loop of a traced model reduces sites.

In an attention whole heads are removed first, then dimensions of the others.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from corp_deploy.spec.widths import Widths
from corp_deploy.traced.models.module import Tracing
from corp_deploy.traced.models.narrowed_model import first_groups
from corp_deploy.traced.models.offered import sites_by_name
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import Site, Sites
from corp_deploy.traced.models.values import TracedValues
from corp_deploy.traced.narrowing.proof import narrow
from corp_deploy.traced.programs.readers import layers
from ground.errors import BadInput

from .change import TracedReduced, groups_left
from .kinds import kind_of
from .method import Method
from .values_kind import TracedValuesKind, groups_of_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A site to reduce to a width by a method.

    `beside`: sites that lose the same heads. `place`: the position in the program of the first node that sums over
    groups of the site or of those beside it.
    """

    site: Site
    width: int
    method: Method
    place: int
    beside: tuple[Site, ...] = ()


def plan_steps(tracing: Tracing, sites: Sites, widths: Widths, method: Method) -> list[Step]:
    """Return the steps of all sites in `widths`, in program order."""
    order = {node.name: place for place, node in enumerate(tracing.program.nodes)}
    every = list(sites.every)
    steps = [step for site in every if site.name in widths for step in _site_steps(site, every, widths, method, order)]
    return sorted(steps, key=lambda step: (step.place, not step.beside))


def _site_steps(
    site: Site, every: list[Site], widths: Widths, method: Method, order: Mapping[str, int]
) -> Iterator[Step]:
    # Whole heads, if any are removed, are a step of their own before the step of their dimensions.
    def place(*sites: Site) -> int:
        return min(order[span.reader] for each in sites for span in each.groups.listening)

    width, left = widths[site.name], _heads_left(site, method)
    most = site.width // site.parts * left
    if left < site.parts:
        others = groups_of_heads(site, torch.arange(left))
        beside = tuple(each for each in every if each.name in others)
        yield Step(site=site, width=most, method=method, place=place(site, *beside), beside=beside)
    if left == site.parts or width < most:
        yield Step(site=site, width=width, method=replace(method, heads_sparsity=None), place=place(site))


def _heads_left(site: Site, method: Method) -> int:
    kind = kind_of(site)
    if isinstance(site, TracedValues) and isinstance(kind, TracedValuesKind):
        return kind.heads_left(site, method)
    return site.parts


def irreducible_sites(dense: Tracing, sites: Sites, widths: Widths, method: Method) -> dict[str, str]:
    """Return the reason for each site that can't be narrowed to its width, tested with each part's first groups."""
    named, first = sites_by_name(dense), dict[str, TracedReduced]()
    for name, width in widths.items():
        site = sites.by_name[name]
        left = _heads_left(site, method)
        kept_K = torch.from_numpy(first_groups(site.groups, width, parts=left))
        beside = groups_of_heads(site, torch.arange(left)) if left < site.parts else {}
        first[name] = TracedReduced(reports=[], kept_K=kept_K, beside=beside)
    names = {groups.key: name for name, groups in named.items()}
    kept = {named[name].key: groups for name, groups in groups_left(first).items() if len(groups)}
    return {names[key]: reason for key, reason in narrow(dense.analysis, kept).unreduced.items()}


def shared_reader(dense: Tracing, sites: Sites, names: Collection[str]) -> str | None:
    """Return why a closed loop can't reduce these sites, None if it can.

    It can't reduce a site that is read by a layer that the model calls more than once.
    """
    called = list(layers(dense.program, in_groups=True))
    calls, weights = Counter(layer.weight for layer in called), {layer.node.name: layer.weight for layer in called}
    for site in (each for each in sites.every if each.name in names):
        behind = [site.behind] if isinstance(site, TracedPairs) else []
        read = [reading.weight for reading in site.readings] + [weights[node] for node in behind if node in weights]
        shared = next((weight for weight in read if calls[weight] > 1), None)
        if shared is not None:
            return (
                f"{site.name} is in front of {shared.removesuffix('.weight')}, a shared layer that the model calls "
                f"{calls[shared]} times; a closed loop fits a layer to what it reads in one place"
            )
    return None


def refuse_shared_readers(dense: Tracing, sites: Sites, names: Collection[str]) -> None:
    """Raise BadInput for sites that no closed loop can reduce."""
    reason = shared_reader(dense, sites, names)
    if reason is not None:
        raise BadInput(
            f"--closed-loop: {reason}. (a) Reduce without --closed-loop, from moments of all calls; (b) leave "
            "sites of that kind as they are"
        )
