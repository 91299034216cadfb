"""Refusals of options that don't fit a model, its moments, or a configuration of transformers."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from calib.active import ACTIVE_EPS
from calib.inputs import InputSet
from calib.moments import ChannelMoments, Moments
from calib.patch_moments import PatchMoments
from corp_deploy.families import traced_model
from corp_deploy.families.family import refuse_idle_options, require_streams, sites_of
from corp_deploy.families.hf_saved import INSTEAD
from corp_deploy.reduction.coverage import coverage, require_as_asked
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.reduction.order import refuse_shared_readers
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.hub_snapshot import CONFIG
from corp_deploy.store.transformers_saved import FOLDER, refuse_unsayable
from corp_deploy.traced.models.module import tracing
from ground.errors import BadInput

from .first_plan import refuse_far_cuts
from .request import ReductionRequest, apply_merging_choice


def _refuse_far_budget(model: nn.Module, request: ReductionRequest) -> None:
    """Raise BadInput for a budget that, spread evenly, cuts every site by more than --most-cut.

    Budgets of latency or with automatic merging aren't checked, as they need measured costs.
    """
    options, currency = request.options, request.options.currency
    if currency is None or currency == "latency" or options.auto_merging or not request.method.has_curves:
        return
    assert options.share is not None, options
    refuse_far_cuts(model, request.method, currency, options.share, options.most_cut)


def require_images(request: ReductionRequest, images: InputSet | None) -> None:
    """Raise BadInput if a reduction needs images and there are none."""
    if request.options.needs_images and images is None:
        raise BadInput(
            "a budget, --within, --heads auto, --closed-loop, --effort, --rescale, --polish, --sparse, heads that "
            "are merged (--select heads=fold) and presets that merge channels (grail-fold, fold) look at the "
            "calibration images; give them with --images, or --text for a text encoder"
        )


def _refuse_partial(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput for sparsities that some site refuses, or that remove nothing, unless --allow-partial is given."""
    if request.options.allow_partial or request.options.allocates:
        return
    # A comparison of head geometries also reduces values of sites whose Q/K must stay, as square heads do.
    method = replace(request.method, geometry="square") if request.options.auto_heads else request.method
    widths = uniform_widths(dense.model, method)
    require_as_asked(coverage(sites_of(dense.model), method, widths, by_site=False), method)


def _refuse_shared_in_loop(model: nn.Module, request: ReductionRequest) -> None:
    """Raise BadInput for a closed loop over a site that is read by a layer that the model calls more than once."""
    if request.options.loop is None:
        return
    sites = sites_of(model)
    every = [site.name for site in sites.every] if request.options.allocates else uniform_widths(model, request.method)
    refuse_shared_readers(tracing(model), sites, every)


def _refuse_idle(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput for options of a kind of sites that the model doesn't have."""
    method = request.method
    geometry = "auto" if request.options.auto_heads else method.geometry
    heads = None if geometry == "padded" else geometry  # padded is the default
    of_heads = {"--attn": method.attention_sparsity, "--whole-heads": method.heads_sparsity, "--heads": heads}
    of_rows = {"--conv": method.conv_sparsity, "--residual": method.residual_sparsity, "--rescale": method.rescales}
    refuse_idle_options(dense.model, "heads", of_heads)
    refuse_idle_options(dense.model, "channels", {"--mlp": method.mlp_sparsity})
    refuse_idle_options(dense.model, "convolutions", of_rows)
    if method.residual_sparsity is not None:
        require_streams(sites_of(dense.model), type(dense.model).__name__)


def apply_asked_merging(dense: Checkpoint, request: ReductionRequest) -> tuple[Checkpoint, ReductionRequest]:
    """Return the model with the requested token merging, unless a budget chooses it, and the request for that model.

    If tokens merge, or a budget may merge them, the request's method doesn't replace sites by constants.

    Raises BadInput if the schedule doesn't fit the model's blocks.
    """
    auto = request.options.auto_merging
    dense = dense if auto else apply_merging_choice(dense, request.options)
    if auto or traced_model.merging_of(dense.model) is not None:  # tokens merge behind attentions, so none may go
        request = replace(request, method=replace(request.method, empties=False))
    return dense, request


def require_sayable(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput if --save-as hf is given with options whose result no transformers configuration describes."""
    options = request.options
    if options.save_as is None:
        return
    reason = ""
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
    refuse_unsayable(dense, uniform_widths(dense.model, request.method))


def refuse_outdated(directory: Path, request: ReductionRequest) -> None:
    """Raise BadInput if an older model's transformers directory would remain beside the new model."""
    theirs = directory / FOLDER
    if request.options.save_as is None and (theirs / CONFIG).is_file():
        raise BadInput(
            f"{theirs}: this transformers directory of another model would remain beside this one; remove it, "
            "overwrite it with --save-as hf, or choose another --output"
        )


def refuse_options(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput for options that don't fit this model, which merges tokens as asked for."""
    _refuse_idle(dense, request)
    _refuse_partial(dense, request)
    _refuse_shared_in_loop(dense.model, request)
    _refuse_far_budget(dense.model, request)


def refuse_unfit(dense: Checkpoint, request: ReductionRequest) -> None:
    """Raise BadInput, before any work, for a request that doesn't fit this model, whatever its moments are."""
    require_sayable(dense, request)
    refuse_options(*apply_asked_merging(dense, request))


def refuse_other_eps(moments: Moments, request: ReductionRequest) -> None:
    """Raise BadInput if a closed loop that ranks channels by active counts has another threshold than the moments."""
    ranked = "active" in (request.method.mlp_selection, request.method.conv_selection)
    counted = [each.eps for each in moments.sites.values() if isinstance(each, ChannelMoments | PatchMoments)]
    other = [eps for eps in counted if eps != ACTIVE_EPS]
    if request.options.loop is not None and ranked and other:
        raise BadInput(
            f"--select active: the moments count |x| > {other[0]:g} and the closed loop |x| > {ACTIVE_EPS:g}; "
            f"calibrate with --active-eps {ACTIVE_EPS:g}, or reduce without --closed-loop"
        )
