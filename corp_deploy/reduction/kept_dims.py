"""Which dimensions of q and k a restricted per-image system (eq. 15) is taken for: those that reduce will keep.

A system of T^2 entries a head shrinks with the fourth power of the share kept; a first pass without it ranks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from calib.moments import HeadMoments, Moments
from calib.sites import Site
from corp_deploy.algebra.planes import dims_of_planes
from corp_deploy.algebra.scores import kept_from_scores, logit_energy, shared_by_groups
from corp_deploy.families.family import sites_of
from corp_deploy.families.widths import aligned_widths
from corp_deploy.traced.models.module import device
from corp_deploy.traced.models.pairs import TracedPairs
from ground.errors import BadInput

from .heads import kept_planes
from .method import method_from_preset
from .model import uniform_widths
from .moments import require_same_model, site_moments


def _queries(model: nn.Module) -> dict[str, TracedPairs]:
    """Sites whose queries and keys may go, by name."""
    pairs = [site for site in sites_of(model).every if isinstance(site, TracedPairs)]
    return {site.name: site for site in pairs if site.repair.mixing != "none"}


def kept_widths(
    model: nn.Module, sites: Sequence[Site], sparsities: Sequence[float], align_head: int | None
) -> dict[str, int]:
    """The widest head that `reduce` will ask of each of these sites at any of the sparsities.

    Ranks don't change, so narrower kept sets lie inside the widest one. Raises BadInput where no site may lose Q/K.
    """
    names, queries = {site.name for site in sites}, _queries(model)
    methods = [method_from_preset("corp", attention_sparsity=share, align_head=align_head) for share in sparsities]
    everywhere = [uniform_widths(model, method) for method in methods]
    widths: dict[str, int] = {}
    for name, width in (pair for widths in everywhere for pair in widths.items()):
        if name in queries and name in names:
            # Dimensions of a head, of what widths count.
            dims = width // len(queries[name].groups_HP) * queries[name].both.joined
            widths[name] = max(dims, widths.get(name, 0))
    if not widths:
        raise BadInput("a system of kept dimensions: none of the sites to calibrate may lose query and key dimensions")
    return widths


def kept_dims(model: nn.Module, first: Moments, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """The dimensions of most logit energy in a first pass, per site and head. Raises BadInput for another model's."""
    require_same_model(model, first)
    queries, where, kept = _queries(model), device(model), {}
    for name, width in widths.items():
        statistics = site_moments(queries[name], first, where)
        assert isinstance(statistics, HeadMoments), name
        scores_HD = shared_by_groups(logit_energy(statistics.energy_HD, statistics.images), queries[name].both.shared)
        if queries[name].both.joined == 2:
            kept[name] = dims_of_planes(kept_planes(scores_HD, width), scores_HD.shape[1]).cpu()
        else:
            kept[name] = kept_from_scores(scores_HD, width).cpu()
    return kept


def narrower(model: nn.Module, sites: Sequence[Site], align_head: int) -> Iterator[tuple[float, dict[str, int]]]:
    """Sparsities that a restricted system can be taken for, the least first, with the widths of every site."""
    sizes = {(each.dims, math.lcm(align_head, each.both.joined)) for each in _queries(model).values()}
    shares = {1.0 - width / size for size, step in sizes for width in aligned_widths(size, step)[:-1]}
    for share in sorted(shares):
        yield share, kept_widths(model, sites, (share,), align_head)
