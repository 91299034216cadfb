"""Calibration of a checkpoint: calib's pass over the sites of a traced model, by one process or under torchrun.

A restricted per-image system (CORP, eq. 15) covers only the S dimensions of q and k that `reduce` will keep. It has
(S(S+1)/2)^2 entries per head, so its size shrinks with the fourth power of the kept share. A first pass without the
system ranks the dimensions.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from calib import calibrate as calib_calibrate
from calib.active import ACTIVE_EPS
from calib.calibrate import ResumeFile, Snapshots
from calib.collect import Collector, Options, Precision
from calib.distributed import Ranks, join_ranks, under_torchrun
from calib.inputs import InputSet
from calib.memory import bytes_needed, patch_channels_that_fit, shapes_of_sites
from calib.moments import ChannelMoments, HeadMoments, Moments, SiteMoments
from calib.patch_moments import PatchMoments
from calib.sites import PatchTaps, Site
from corp_deploy.algebra.planes import dims_of_planes
from corp_deploy.algebra.scores import kept_from_scores, logit_energy, shared_by_groups
from corp_deploy.families.family import (
    HEADS,
    example_of,
    refuse_idle_options,
    require_streams,
    sites_of,
    taps_for,
    token_weigher,
)
from corp_deploy.families.traced_model import hooked_model
from corp_deploy.spec.widths import aligned_widths
from corp_deploy.store.checkpoint import Checkpoint, on_device
from corp_deploy.store.input_sets import lineage_for_moments
from corp_deploy.store.library_model import refuse_other_weights
from corp_deploy.traced.models.module import device_of as device_of
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import TracedConvolutions, TracedStream, calibration_taps
from ground.errors import BadInput

from .heads import kept_planes
from .method import method_from_preset
from .model import uniform_widths
from .moments import require_same_model, site_moments
from .steady_inputs import require_steady_on


def _places(model: nn.Module) -> Iterator[tuple[PatchTaps, Tensor]]:
    """Yield convolutions that may sum the patches of some input channels only, with the strength [G,C] of each channel.

    Each convolution is the only layer that reads a site, channel by channel, and each of its groups keeps equally many
    channels. The strength of a channel is the norm of the weights that read it times that of the weights that write it.
    """
    for site in (each for each in sites_of(model).every if isinstance(each, TracedConvolutions)):
        every = [each for each in site.readings if not each.is_squeeze]
        layer, columns_GM = every[0].layer, every[0].columns_GM
        if len(every) > 1 or not isinstance(layer, nn.Conv2d) or site.parts != layer.groups:
            continue
        if columns_GM.shape == (layer.in_channels, 1):
            taps, groups = PatchTaps(name=every[0].name, output=layer), layer.groups
            read_GC = every[0].gained_weight.flatten(2).unflatten(0, (groups, -1)).square().sum(dim=(1, 3)).sqrt()
            written_F = torch.empty(layer.in_channels, dtype=read_GC.dtype, device=read_GC.device)
            written_F[torch.from_numpy(columns_GM[:, 0]).to(read_GC.device)] = site.writing_GX().norm(dim=1)
            yield taps, read_GC * written_F.view(groups, -1)


def _within_memory(model: nn.Module, taps: Sequence[Site], bytes_of_sums: int) -> list[Site]:
    """Return the taps, convolutions limited to their strongest channels until all sums fit into `bytes_of_sums`.

    Raises:
        BadInput: the sums don't fit even with the fewest channels.
    """
    places = {taps.name: (taps, strength_GC) for taps, strength_GC in _places(model)}
    shapes = shapes_of_sites(hooked_model(model), taps, example=example_of(model), device=device_of(model))
    fewer = dict[str, Site]()
    for name, count in patch_channels_that_fit(shapes, bytes_of_sums, free=places).items():
        own, strength_GC = places[name]
        fewer[name] = replace(own, channels_GR=strength_GC.topk(count, dim=1).indices.sort(dim=1).values)
    return [fewer.get(tap.name, tap) for tap in taps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The statistics to take: sites by glob pattern, with or without attention, CORP's per-image system.

    `kept` restricts that system to these dimensions per head, at these sites; see `kept_dims`. `patch_bytes` limits all
    sums: the largest convolutions sum the patches of fewer channels, and layers that read nothing but residual streams
    are left out unless `residual`. `active_eps`: the magnitude above which an entry counts as active. `like`: earlier
    moments; the same sites are calibrated, and for convolutions the same channels have patches.
    """

    patterns: tuple[str, ...] = ()
    attention: bool = True
    attention_system: bool = False
    kept: Mapping[str, Tensor] | None = None
    precision: Precision = "float32"
    residual: bool = False
    patch_bytes: int | None = None
    active_eps: float = ACTIVE_EPS
    like: Moments | None = None


def statistics_of(moments: Moments) -> Statistics:
    """Return settings with the sites, `active_eps` and precision of these moments, so that sums can be subtracted."""
    counted = (each.eps for each in moments.sites.values() if isinstance(each, ChannelMoments | PatchMoments))
    precision = cast(Precision, moments.lineage.get("dtype", "float32"))
    return Statistics(like=moments, active_eps=next(counted, ACTIVE_EPS), precision=precision)


def _with_same_channels(tap: Site, moments: SiteMoments) -> Site:
    fewer = moments.channels_GR if isinstance(moments, PatchMoments) else None
    return tap if fewer is None else replace(cast(Any, tap), channels_GR=fewer)


def choose_sites(checkpoint: Checkpoint, statistics: Statistics) -> list[Site]:
    """Return the sites that the statistics name; raise BadInput if the model has none or a pattern fits none."""
    restricts = statistics.attention_system or statistics.kept is not None
    refuse_idle_options(checkpoint.model, HEADS, {"--attention-system": restricts})
    sites = sites_of(checkpoint.model)
    every = calibration_taps(checkpoint.model, sites)
    if statistics.residual:
        require_streams(sites, type(checkpoint.model).__name__)
    if not every:
        reasons = (
            "; ".join(f"{each.name}: {each.reason}" for each in sites.refused) or "no layer's output can be removed"
        )
        raise BadInput(f"nothing to calibrate: no site of this model can be reduced ({reasons})")
    for pattern in statistics.patterns:
        if not any(fnmatchcase(site.name, pattern) for site in every):
            raise BadInput(f"--sites {pattern!r} fits no site; there are {', '.join(s.name for s in every[:4])}, ...")
    without = frozenset[str]() if statistics.attention else taps_for(sites, HEADS)
    patterns = statistics.patterns or ("*",)
    named = [
        each for each in every if each.name not in without and any(fnmatchcase(each.name, word) for word in patterns)
    ]
    if statistics.like is not None:
        taken = statistics.like.sites
        return [_with_same_channels(each, taken[each.name]) for each in named if each.name in set(taken)]
    if statistics.patch_bytes is None:
        return named
    if not statistics.residual:  # layers that only read streams are left out: they need patches of all channels
        own = [site for site in sites.every if not isinstance(site, TracedStream)]
        heard = {tap.name for site in own for tap in site.listening()}
        named = [tap for tap in named if tap.name in heard]
    return _within_memory(checkpoint.model, named, statistics.patch_bytes)


def memory_needed(
    checkpoint: Checkpoint, sites: Sequence[Site], statistics: Statistics, widths: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the bytes that the sums of each site will take; `widths`: head widths of a restricted per-image system."""
    model = checkpoint.model
    shapes = shapes_of_sites(hooked_model(model), sites, example=example_of(model), device=device_of(model))
    return bytes_needed(shapes, attention_system=statistics.attention_system and not widths, kept=widths)


def _mixable_pairs(model: nn.Module) -> dict[str, TracedPairs]:
    """Return by name the sites of queries and keys whose dimensions a recovery can mix."""
    pairs = [site for site in sites_of(model).every if isinstance(site, TracedPairs)]
    return {site.name: site for site in pairs if site.repair.mixing != "none"}


def kept_widths(
    model: nn.Module, sites: Sequence[Site], sparsities: Sequence[float], align_head: int | None
) -> dict[str, int]:
    """Return for each site the largest head width that `reduce` keeps at any of the sparsities.

    The ranking of dimensions is the same at every width, so narrower kept sets lie inside the widest one.

    Raises:
        BadInput: at none of the sites can dimensions of queries and keys be removed.
    """
    names, queries = {site.name for site in sites}, _mixable_pairs(model)
    methods = [method_from_preset("corp", attention_sparsity=share, align_head=align_head) for share in sparsities]
    everywhere = [uniform_widths(model, method) for method in methods]
    widths: dict[str, int] = {}
    for name, width in (pair for widths in everywhere for pair in widths.items()):
        if name in queries and name in names:
            # A width counts groups of all heads; this is the dimensions of one head.
            widths[name] = max(width // len(queries[name].groups_HP) * queries[name].both.joined, widths.get(name, 0))
    if not widths:
        raise BadInput("--attn: none of the sites to calibrate has removable query and key dimensions; leave it out")
    return widths


def kept_dims(model: nn.Module, first: Moments, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Return by site the dimensions [H,R] of most logit energy; raise BadInput for another model's moments."""
    require_same_model(model, first)
    queries, where, kept = _mixable_pairs(model), device_of(model), {}
    for name, width in widths.items():
        statistics = site_moments(queries[name], first, where)
        assert isinstance(statistics, HeadMoments), name
        scores_HD = shared_by_groups(logit_energy(statistics.energy_HD, statistics.images), queries[name].both.shared)
        if queries[name].both.joined == 2:
            kept[name] = dims_of_planes(kept_planes(scores_HD, width), scores_HD.shape[1]).cpu()
        else:
            kept[name] = kept_from_scores(scores_HD, width).cpu()
    return kept


def restricted_widths(
    model: nn.Module, sites: Sequence[Site], align_head: int
) -> Iterator[tuple[float, dict[str, int]]]:
    """Yield the sparsities at which a head width changes, ascending, each with the head width of every site."""
    sizes = {(each.dims, math.lcm(align_head, each.both.joined)) for each in _mixable_pairs(model).values()}
    shares = {1.0 - width / size for size, step in sizes for width in aligned_widths(size, step)[:-1]}
    for share in sorted(shares):
        yield share, kept_widths(model, sites, (share,), align_head)


def sparsity_that_fits(
    checkpoint: Checkpoint, sites: Sequence[Site], statistics: Statistics, align_head: int, available: int
) -> float | None:
    """Return the least sparsity whose restricted system fits into the available bytes, None if none fits."""
    for sparsity, widths in restricted_widths(checkpoint.model, sites, align_head):
        if sum(memory_needed(checkpoint, sites, statistics, widths).values()) <= available:
            return sparsity
    return None


def collector_for(checkpoint: Checkpoint, statistics: Statistics, device: str = "cpu") -> tuple[nn.Module, Collector]:
    """Return the model on the device (a copy if it is on another one), and a collector of the chosen sites.

    Raises:
        BadInput: there is no site.
    """
    there = on_device(checkpoint, device)
    sites = choose_sites(there, statistics)
    refuse_other_weights(checkpoint)
    options = Options(
        attention_system=statistics.attention_system and statistics.kept is None,
        kept=statistics.kept,
        eps=statistics.active_eps,
        precision=statistics.precision,
        token_weights=token_weigher(there.model),
    )
    return there.model, Collector(hooked_model(there.model), sites, device=device, options=options)


def calibrate(
    checkpoint: Checkpoint,
    images: InputSet,
    *,
    batch_size: int,
    device: str = "cpu",
    statistics: Statistics | None = None,
    saved: ResumeFile | None = None,
    ranks: Ranks = calib_calibrate.ALONE,
    snapshots: Snapshots | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Moments:
    """Return the moments of the chosen sites, with the lineage that ties them to this model and these images.

    With `saved` an interrupted run continues; `snapshots` receive the moments of the first images, at several numbers
    of them. If `device` is another one than the model's, a copy of the model runs there.

    Raises:
        BadInput: there is no site or too little memory, or the model isn't deterministic.
    """
    model, collector = collector_for(checkpoint, statistics or Statistics(), device)
    require_steady_on(model, images)

    def of_first(count: int, moments: Moments) -> Moments:
        return replace(moments, lineage={**moments.lineage, "images": images.subset(range(count)).digest})

    moments = calib_calibrate.calibrate_sites(
        collector,
        images,
        batch_size=batch_size,
        lineage=lineage_for_moments(checkpoint),
        checkpoint=saved,
        ranks=ranks,
        snapshots=None if snapshots is None else snapshots.changed(of_first),
        progress=on_progress,
    )
    return replace(moments, lineage={**moments.lineage, "images": images.identified().digest})


def ranks_of_this_run(device: str, *, timeout_s: float = 1800.0) -> AbstractContextManager[Ranks]:
    """Return a context with this process's rank: among torchrun's processes if it started this one, else alone."""
    return join_ranks(device, timeout_s=timeout_s) if under_torchrun() else nullcontext(calib_calibrate.ALONE)
