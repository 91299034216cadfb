"""How far a budget goes into what can be cut, told by costs alone, before any statistics, without weights; refusals of
options that don't fit this model, these moments, or a configuration of transformers.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from calib.active import ACTIVE_EPS
from calib.inputs import InputSet
from calib.moments import ChannelMoments, Moments
from calib.patch_moments import PatchMoments
from corp_deploy.families import traced_model
from corp_deploy.families.family import STREAMS, refuse_idle_options, require_streams, sites_of
from corp_deploy.families.hf_saved import INSTEAD
from corp_deploy.families.inspection import fixed_shares
from corp_deploy.reduction.coverage import coverage, require_as_asked
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.hub_snapshot import CONFIG
from corp_deploy.store.transformers_saved import FOLDER, origin_of
from corp_deploy.traced.models.module import tracing
from corp_deploy.traced.models.sites import Currency
from ground.errors import BadInput

from .budget import cost_of_all_tokens, dense_cost
from .request import ReductionRequest, merging_checkpoint

NAMED = 3
_WORDS: Mapping[Currency, str] = {"macs": "MACs", "params": "parameters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlan:
    """What a budget, of `macs` or parameters, would take: `cut` in hundredths, evenly, of each of the `sites` that it
    may cut, which have the share `offered`; None where it is out of reach. `least`: the smallest budget in hundredths
    that cuts no more than `most_cut`. `stays`: what it leaves whole, with the share of each and why, largest first.
    """

    macs: float
    offered: float
    sites: int
    cut: float | None
    most_cut: float
    least: float
    stays: tuple[tuple[str, float, str], ...]

    @property
    def holds(self) -> bool:
        return self.cut is not None and self.cut <= self.most_cut

    def as_json(self) -> dict[str, Any]:
        stays = [{"name": name, "share": share, "reason": reason} for name, share, reason in self.stays]
        return {**asdict(self), "stays": stays}


def first_plan(
    model: nn.Module, method: Method, share: float, most_cut: float, currency: Currency = "macs"
) -> FirstPlan:
    """Of a budget with this method, by what even cuts leave, whatever multiples widths come in."""
    total, full_cost = dense_cost(model, currency), cost_of_all_tokens(model, currency)
    layers = tracing(model).shares.macs if currency == "macs" else tracing(model).shares.parameters
    keys, whole = list[str](), dict[str, str]()
    for site in sites_of(model).every:
        if len(kind_of(site).offers(site, method)) > 1:
            keys.append(site.groups.key)
        elif site.kind == STREAMS:
            whole[site.name] = "a stream, which --residual reduces"
        else:
            why = kind_of(site).refusal(site, method)
            whole[site.name] = why or "no smaller multiple; --align asks for finer widths"

    def saved(cut: float) -> float:
        return layers.saved(dict.fromkeys(keys, 1.0 - cut)) / full_cost

    save = total / full_cost - share
    percent = bisect_left(range(101), save - 1e-9, key=lambda percent: saved(percent / 100))
    least = math.ceil(100 * (total / full_cost - saved(most_cut)) - 1e-9) / 100
    return FirstPlan(
        macs=share,
        offered=saved(1.0),
        sites=len(keys),
        cut=None if percent > 100 else percent / 100,
        most_cut=most_cut,
        least=min(least, 1.0),
        stays=tuple(fixed_shares(model, currency, whole)),
    )


def refuse_far(model: nn.Module, method: Method, currency: Currency, share: float, most_cut: float) -> None:
    """Raise BadInput for a budget that takes more of every site than `most_cut`, evenly, with what stays and why. One
    that no widths meet is left to the planner, which knows what constants save.
    """
    plan, word = first_plan(model, method, share, most_cut, currency), _WORDS[currency]
    if plan.cut is None or plan.holds:
        return
    stays = ", ".join(f"{name} {part:.0%} ({reason})" for name, part, reason in plan.stays[:NAMED])
    raise BadInput(
        f"a budget of {share:g} of the {word} takes {plan.cut:.2f} of every site that it may cut, evenly, where "
        f"{most_cut:g} is the most: these have {plan.offered:.0%} of the {word}, and the rest stays: {stays}; "
        f"keep more (--{currency} {plan.least:g}), or allow it: --most-cut {plan.cut:g}"
    )


def refuse_far_budget(model: nn.Module, request: ReductionRequest) -> None:
    """Of a reduction as asked for; what latency costs only its tables tell, what merging saves only its curves."""
    options, currency = request.options, request.options.currency
    if currency is None or currency == "latency" or options.auto_merging or not request.method.has_curves:
        return
    assert options.share is not None, options
    refuse_far(model, request.method, currency, options.share, options.most_cut)


def require_images(request: ReductionRequest, images: InputSet | None) -> None:
    """Raise BadInput where a reduction looks at images and there are none."""
    if request.options.needs_images and images is None:
        raise BadInput(
            "a budget, --within, --heads auto, --closed-loop, --effort, --rescale, --polish, --sparse, heads that "
            "are merged (--select heads=fold) and presets that merge channels (grail-fold, fold) look at the "
            "calibration images; give them with --images, or --text for a text encoder"
        )


def refuse_partial(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput for sparsities that some site can't take, or that remove nothing; a budget is met or refused."""
    if request.options.allow_partial or request.options.allocates:
        return
    # Weighing head geometries offers the values of sites whose Q/K must stay, as square heads do.
    method = replace(request.method, geometry="square") if request.options.auto_heads else request.method
    widths = uniform_widths(dense.model, method)
    require_as_asked(coverage(sites_of(dense.model), method, widths, by_site=False), method)


def refuse_idle(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput for options of a kind of sites that the model doesn't have."""
    method = request.method
    geometry = "auto" if request.options.auto_heads else method.geometry
    # Heads are padded where nothing is said of them.
    heads = None if geometry == "padded" else geometry
    of_heads = {"--attn": method.attention_sparsity, "--whole-heads": method.heads_sparsity, "--heads": heads}
    of_rows = {"--conv": method.conv_sparsity, "--residual": method.residual_sparsity, "--rescale": method.rescales}
    refuse_idle_options(dense.model, "heads", of_heads)
    refuse_idle_options(dense.model, "channels", {"--mlp": method.mlp_sparsity})
    refuse_idle_options(dense.model, "convolutions", of_rows)
    if method.residual_sparsity is not None:
        require_streams(sites_of(dense.model), type(dense.model).__name__)


def as_merged(dense: Checkpoint, request: ReductionRequest) -> tuple[Checkpoint, ReductionRequest]:
    """The model that merges tokens as asked for, but where a budget will say how, and the request as that model takes
    it. Raises BadInput for a schedule that is none of its blocks.
    """
    auto = request.options.auto_merging
    dense = dense if auto else merging_checkpoint(dense, request.options)
    if auto or traced_model.merging_of(dense.model) is not None:  # tokens merge behind attentions
        request = replace(request, method=replace(request.method, empties=False))
    return dense, request


def require_sayable(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput, before any work, for a reduction that transformers could not be told of, by its options."""
    options = request.options
    if options.save_as is None:
        return
    origin, reason = origin_of(dense), ""
    if options.schedule is not None or traced_model.merging_of(dense.model) is not None:
        reason = "no class of transformers merges tokens"
    elif options.allocates:
        reason = (
            "a budget gives every layer widths of its own, and a configuration has one for all; give --mlp and --attn"
        )
    elif options.auto_heads:
        reason = "--heads auto may leave queries and keys narrower than values; give --heads square"
    if reason:
        raise BadInput(f"--save-as hf: {reason}; {INSTEAD}")
    origin.refuse_unsayable(sites_of(dense.model), uniform_widths(dense.model, request.method))


def refuse_outdated(directory: Path, request: ReductionRequest) -> None:
    """Raise BadInput where a form of transformers would stay beside a model that it is not of."""
    theirs = directory / FOLDER
    if request.options.save_as is None and (theirs / CONFIG).is_file():
        raise BadInput(
            f"{theirs}: this transformers directory of another model would remain beside this one; remove it, "
            "overwrite it with --save-as hf, or choose another --output"
        )


def refuse_unfit(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput, before any work, for what can't be asked of this model, whatever its moments are."""
    require_sayable(dense, request)
    dense, request = as_merged(dense, request)
    refuse_idle(dense, request)
    refuse_partial(dense, request)
    refuse_far_budget(dense.model, request)


def refuse_other_eps(moments: Moments, request: ReductionRequest) -> None:
    """Raise BadInput where a closed loop would rank by another count of what is active than the moments'."""
    ranked = "active" in (request.method.mlp_selection, request.method.conv_selection)
    counted = [each.eps for each in moments.sites.values() if isinstance(each, ChannelMoments | PatchMoments)]
    other = [eps for eps in counted if eps != ACTIVE_EPS]
    if request.options.loop is not None and ranked and other:
        raise BadInput(
            f"--select active: the moments count |x| > {other[0]:g} and the closed loop |x| > {ACTIVE_EPS:g}; "
            "calibrate with that --active-eps, or reduce without --closed-loop"
        )
