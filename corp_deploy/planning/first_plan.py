"""First plans: the share that a budget takes of every site, by costs alone, before calibration."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import STREAMS, sites_of
from corp_deploy.families.inspection import fixed_shares
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import Method
from corp_deploy.traced.models.module import tracing
from corp_deploy.traced.models.sites import Currency
from ground.errors import BadInput

NAMED = 3  # parts that a refusal names
_WORDS: Mapping[Currency, str] = {"macs": "MACs", "params": "parameters"}


def dense_cost(model: nn.Module, currency: Currency) -> int:
    """Return the MACs of one input, or the parameters, of a whole model."""
    return macs(model) if currency == "macs" else parameters(model)


def cost_of_all_tokens(model: nn.Module, currency: Currency) -> int:
    """Return the cost of a model if it merged no tokens; shares of the cost refer to it."""
    merges = traced_model.merging_of(model) is not None
    return dense_cost(traced_model.with_merging(model, None) if merges else model, currency)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlan:
    """An even cut of all sites that meets a budget of MACs or parameters.

    `macs` is the budget: the share of the cost to keep, also of parameters. `sites` is the number of sites that it may
    cut; removing them whole saves the share `offered` of the cost. `cut` is the share that it takes of each site's
    width, a multiple of 0.01, or None if the budget is out of reach. `least` is the smallest budget that cuts at most
    `most_cut`. `stays` are the parts of the model that can't be cut: name, share of the cost and reason, largest first.
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


def compute_first_plan(
    model: nn.Module, method: Method, share: float, most_cut: float, currency: Currency = "macs"
) -> FirstPlan:
    """Compute the even cut that meets a budget with this method, without rounding widths to their alignment."""
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


def refuse_far_cuts(model: nn.Module, method: Method, currency: Currency, share: float, most_cut: float) -> None:
    """Raise BadInput for a budget that an even cut meets only by taking more than `most_cut` of every site.

    A budget that no even cut meets is left to the planner, which can also replace sites by constants.
    """
    plan, word = compute_first_plan(model, method, share, most_cut, currency), _WORDS[currency]
    if plan.cut is None or plan.holds:
        return
    stays = ", ".join(f"{name} {part:.0%} ({reason})" for name, part, reason in plan.stays[:NAMED])
    raise BadInput(
        f"a budget of {share:g} of the {word} takes {plan.cut:.2f} of every site that it may cut, evenly, where "
        f"{most_cut:g} is the most: these have {plan.offered:.0%} of the {word}, and the rest stays: {stays}; "
        f"keep more (--{currency} {plan.least:g}), or allow it: --most-cut {plan.cut:g}"
    )
