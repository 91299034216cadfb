"""A traced model's sites and what stays of it, for people and machines."""

import re
from collections import defaultdict
from typing import Any

from torch import nn

from .modules import parameters
from .traced_model import sites, tracing
from .traced_sites import names_of

ELSEWHERE = "all else"


def traced_rows(model: nn.Module, macs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for every site that is offered, reducible or not, with what goes with it, and one for all else; `macs` of
    the model.
    """
    found, offered = tracing(model), sites(model)
    shares = found.shares
    by_name = {site.name: site for site in offered.every}
    reasons = {refusal.name: refusal.reason for refusal in offered.refused}
    rows: list[dict[str, Any]] = []
    named = names_of(found)
    for name, groups in ((each, named[each]) for each in named if each in by_name or each in reasons):
        words = by_name[name].describe() if name in by_name else f"{groups.kind} {groups.size}"
        own = {"parameters": shares.parameters.alone[groups.key], "macs": shares.macs.alone[groups.key]}
        rows.append({"site": name, **own, "width": words, "reason": reasons.get(name, "")})
    rest = {"parameters": parameters(model), "macs": macs}
    left = {key: total - sum(row[key] for row in rows) for key, total in rest.items()}
    return rows, [{"name": ELSEWHERE, **left}]


def stays_of(model: nn.Module) -> list[dict[str, Any]]:
    """What can't be narrowed: by reason, those alike but for numbers together, the layers and their channels."""
    layers: dict[str, list[str]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    reasons: dict[str, str] = {}
    for stay in tracing(model).analysis.stays:
        key = re.sub(r"\d+", "0", stay.reason)
        reasons.setdefault(key, stay.reason)
        layers[key].append(stay.name.removesuffix(".weight"))
        counts[key] += stay.count
    return [{"reason": reason, "layers": layers[key], "count": counts[key]} for key, reason in reasons.items()]
