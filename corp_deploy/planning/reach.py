"""How far a budget goes into what can be cut, told by costs alone: before any statistics, without weights."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.families.ineffective_options import STREAMS
from corp_deploy.families.inspection import fixed_shares
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import Method
from corp_deploy.traced.finding.shares import Layers
from corp_deploy.traced.models.module import tracing
from corp_deploy.traced.models.sites import Currency, Site
from ground.errors import BadInput

from .budget import dense_cost
from .request import ReductionRequest

NAMED = 3
_WORDS: Mapping[Currency, str] = {"macs": "MACs", "params": "parameters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What even cuts leave, whatever multiples widths come in: `keys` of the sites that budgets may cut, and
    `whole_sites` why others are not; `whole` the dense cost that shares are of, `total` the same with tokens merged as
    they are.
    """

    model: nn.Module
    currency: Currency
    layers: Layers
    keys: tuple[str, ...]
    whole_sites: Mapping[str, str]
    total: int
    whole: int

    def _saved(self, cut: float) -> float:
        return self.layers.saved(dict.fromkeys(self.keys, 1.0 - cut)) / self.whole

    def cut_for(self, share: float) -> float | None:
        """The least even cut, in hundredths, that leaves no more than this share; None where none does."""
        save = self.total / self.whole - share
        percent = bisect_left(range(101), save - 1e-9, key=lambda percent: self._saved(percent / 100))
        return None if percent > 100 else percent / 100

    def least_within(self, most_cut: float) -> float:
        """The least share in hundredths for which no site is cut by more, evenly."""
        return min(math.ceil(100 * (self.total / self.whole - self._saved(most_cut)) - 1e-9) / 100, 1.0)

    @property
    def offered(self) -> float:
        """The share that goes with the sites that budgets may cut."""
        return self._saved(1.0)

    def stays(self) -> list[tuple[str, float, str]]:
        """What no such budget touches, with the share of each and why, largest first."""
        return fixed_shares(self.model, self.currency, self.whole_sites)


def _why_whole(site: Site, method: Method) -> str:
    if site.kind == STREAMS:
        return "a stream, which --residual reduces"
    return kind_of(site).refusal(site, method) or "no smaller multiple; --align asks for finer widths"


def reach(model: nn.Module, method: Method, currency: Currency) -> Reach:
    """Of the sites that a budget with this method chooses among."""
    shares = tracing(model).shares
    merges = traced_model.merging_of(model) is not None
    total = dense_cost(model, currency)
    offered, whole = list[str](), dict[str, str]()
    for site in sites_of(model).every:
        if len(kind_of(site).offers(site, method)) > 1:
            offered.append(site.groups.key)
        else:
            whole[site.name] = _why_whole(site, method)
    return Reach(
        model=model,
        currency=currency,
        layers=shares.macs if currency == "macs" else shares.parameters,
        keys=tuple(offered),
        whole_sites=whole,
        total=total,
        whole=dense_cost(traced_model.with_merging(model, None), currency) if merges else total,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlan:
    """What a budget of MACs would take: `cut` evenly of each of its `sites`, which have the share `offered`; None where
    it is out of reach. `least`: the smallest budget in hundredths that cuts no more than `most_cut`. `stays`: what it
    leaves whole, with the share of each and why.
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


def first_plan(model: nn.Module, method: Method, share: float, most_cut: float) -> FirstPlan:
    """Of a budget with this method."""
    found = reach(model, method, "macs")
    return FirstPlan(
        macs=share,
        offered=found.offered,
        sites=len(found.keys),
        cut=found.cut_for(share),
        most_cut=most_cut,
        least=found.least_within(most_cut),
        stays=tuple(found.stays()),
    )


def refuse_far(model: nn.Module, method: Method, currency: Currency, share: float, most_cut: float) -> None:
    """Raise BadInput for a budget that takes more of every site than `most_cut`, evenly, with what stays and why. One
    that no widths meet is left to the planner, which knows what constants save.
    """
    found = reach(model, method, currency)
    cut = found.cut_for(share)
    if cut is None or cut <= most_cut:
        return
    word, enough = _WORDS[currency], found.least_within(most_cut)
    stays = ", ".join(f"{name} {part:.0%} ({reason})" for name, part, reason in found.stays()[:NAMED])
    raise BadInput(
        f"a budget of {share:g} of the {word} takes {cut:.2f} of every site that it may cut, evenly, where "
        f"{most_cut:g} is the most: these have {found.offered:.0%} of the {word}, and the rest stays: {stays}; "
        f"keep more (--{currency} {enough:g}), or allow it: --most-cut {cut:g}"
    )


def refuse_far_budget(model: nn.Module, request: ReductionRequest) -> None:
    """Likewise of a reduction as it is asked for; what latency costs only its tables tell, and what merging tokens
    saves beside widths only its curves.
    """
    options, currency = request.options, request.options.currency
    if currency is None or currency == "latency" or options.auto_merging or not request.method.has_curves:
        return
    assert options.share is not None, options
    refuse_far(model, request.method, currency, options.share, options.most_cut)
