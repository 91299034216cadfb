"""What a model is made of, where its cost lies and what merging makes of it, counted, for people and machines."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import Any

from torch import nn

from corp_deploy.traced.models.merging import MergingRecord, tokens_after
from corp_deploy.traced.models.module import parameters, tracing
from corp_deploy.traced.models.offered import names_of, sites_of
from corp_deploy.traced.models.sites import Currency
from corp_deploy.traced.models.token_merging import merges_in

from . import traced_model
from .counting import counted
from .family import output_ports, outputs_of

ELSEWHERE = "all else"
ROUNDED = 1e-3
"""Of a total: what is left where shares are rounded."""


def traced_rows(model: nn.Module, macs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for every site that is offered, reducible or not, with what goes with it, and one for all else; `macs` of
    the model.
    """
    found, offered = tracing(model), sites_of(model)
    by_name = {site.name: site for site in offered.every}
    reasons = {refusal.name: refusal.reason for refusal in offered.refused}
    rows: list[dict[str, Any]] = []
    named = {name: groups for name, groups in names_of(found).items() if name in by_name or name in reasons}
    for name, groups in named.items():
        words = by_name[name].describe() if name in by_name else f"{groups.kind} {groups.size}"
        own = {"parameters": found.shares.parameters.alone[groups.key], "macs": found.shares.macs.alone[groups.key]}
        rows.append({"site": name, **own, "width": words, "reason": reasons.get(name, "")})
    rest = {"parameters": parameters(model), "macs": macs}
    left = {key: total - sum(row[key] for row in rows) for key, total in rest.items()}
    return rows, _fixed_rows(model, [groups.key for groups in named.values()], left)


def _fixed_rows(model: nn.Module, keys: Collection[str], left: Mapping[str, int]) -> list[dict[str, Any]]:
    """What is of no site, by the parts of the model."""
    shares = tracing(model).shares
    macs = _by_part(shares.macs.without(keys))
    of_sites = _by_part(shares.parameters.without(())) - _by_part(shares.parameters.without(keys))
    every = _by_part({name: each.numel() for name, each in model.named_parameters()})
    parts = [
        name for name in dict.fromkeys((*every, *macs)) if round(every[name] - of_sites[name]) > 0 or macs[name] > 0.5
    ]
    sums = {"parameters": Counter({name: every[name] - of_sites[name] for name in parts}), "macs": macs}
    exact = {key: _whole({name: sums[key][name] for name in parts}, left[key]) for key in sums}
    named = [name for name in (*parts, ELSEWHERE) if any(figures.get(name, 0) for figures in exact.values())]
    return [
        {"name": name, **{key: figures.get(name, 0) for key, figures in exact.items()}, "reason": _reason(model, name)}
        for name in named
    ]


def _whole(figures: Mapping[str, float], total: int) -> dict[str, int]:
    """In whole numbers, rounded so that their sum is this; what is no rounding is all else's."""
    whole = {name: round(value) for name, value in figures.items()}
    over = total - sum(whole.values())
    largest = max(whole, key=lambda name: whole[name], default="")
    if largest and abs(over) < max(ROUNDED * total, whole[largest] / 100) and whole[largest] + over >= 0:
        return whole | {largest: whole[largest] + over}
    return whole | {ELSEWHERE: over}


def _by_part(figures: Mapping[str, float]) -> Counter[str]:
    parts = Counter[str]()
    for name, value in figures.items():
        parts[_part(name)] += value  # type: ignore[assignment]  # sums of shares
    return parts


def _part(name: str) -> str:
    """What of the model a module or a parameter is of, down to where its blocks are numbered."""
    path = re.sub(r"\.(weight|bias|gamma)$", "", name).split(".")
    before = [*takewhile(lambda word: not word.isdigit(), path)]
    return ".".join(before[:2]) or ELSEWHERE


def _reason(model: nn.Module, part: str) -> str:
    """Why most of its channels stay."""
    stays = [each for each in tracing(model).analysis.stays if _part(each.name) == part]
    return max(stays, key=lambda each: each.count).reason if stays else ""


def fixed_shares(model: nn.Module, currency: Currency, whole: Mapping[str, str]) -> list[tuple[str, float, str]]:
    """What stays, with the share of each and why, largest first: sites that can't be narrower, or are left `whole` for
    the reason told by their names, and the parts of the model that are no site.
    """
    own, named = tracing(model), names_of(tracing(model))
    layers = own.shares.macs if currency == "macs" else own.shares.parameters
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in {**whole, **{each.name: each.reason for each in sites_of(model).refused}}.items():
        reasons[reason].append(name)
    of_sites = [
        (
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}",
            sum(layers.alone[named[name].key] for name in names),
            reason,
        )
        for reason, names in reasons.items()
    ]
    parts = _by_part(layers.without({groups.key for groups in named.values()}))
    every = [*of_sites, *((name, value, _reason(model, name) or "it is of no site") for name, value in parts.items())]
    total = sum(cost for cost, _ in layers.every)
    return [(name, value / total, why) for name, value, why in sorted(every, key=lambda each: -each[1]) if value > 0]


def stays_of(model: nn.Module) -> list[dict[str, Any]]:
    """What can't be narrowed: by reason, those alike but for numbers together, the layers and their channels."""
    rows = dict[str, dict[str, Any]]()
    for stay in tracing(model).analysis.stays:
        row = rows.setdefault(re.sub(r"\d+", "0", stay.reason), {"reason": stay.reason, "layers": [], "count": 0})
        row["layers"].append(stay.name.removesuffix(".weight"))
        row["count"] += stay.count
    return [*rows.values()]


def merging_record(model: nn.Module) -> MergingRecord | None:
    """Counted for one input; None for a model that merges nothing."""
    merging = traced_model.merging_of(model)
    if merging is None:
        return None
    kinds, count = traced_model.token_kinds(model), counted(model)
    protected = len(kinds) - kinds.count("patch")
    return MergingRecord(
        **merging.as_json() | {"schedule": merging.schedule},
        protected=protected,
        tokens=(len(kinds), *tokens_after(merging, len(kinds), protected)),
        macs=count.macs,
        macs_of_merging=sum(map(count.within, merges_in(model))),
        macs_with_all_tokens=counted(traced_model.with_merging(model, None)).macs,
    )


def inspection_of_model(model: nn.Module) -> dict[str, Any]:
    """Sites with widths, parameters and MACs of one input and the reason where nothing can be reduced; the same figures
    of everything that is no site; totals, which are the sums of both.
    """
    count, merging = counted(model), merging_record(model)
    sites, fixed = traced_rows(model, count.macs)
    outputs = [
        {"name": port.name, "role": port.role, "shape": list(shape)}
        for port, shape in zip(output_ports(model), count.shapes, strict=True)
    ]
    return {
        "architecture": type(model).__name__,
        "depth": traced_model.depth(model),
        "parameters": parameters(model),
        "macs": count.macs,
        "sites": sites,
        "fixed": fixed,
        "stays": stays_of(model),
        **({} if outputs_of(model) is None else {"outputs": outputs}),
        **({} if merging is None else {"merging": merging.as_json() | {"sentences": list(merging.sentences())}}),
    }
