"""Inspection of models: their sites and costs, what is fixed, token merging, and the margins of merging's choices.

Merging chooses tokens by comparing similarities. Two runtimes that round differently make the same choices where every
margin is larger than their rounding errors, and may make different ones where a margin is smaller.

Legend: B inputs, N tokens, A and D unprotected tokens at even and at odd positions, R tokens merged, C channels.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from calib.inputs import Inputs, input_count, run_model
from corp_deploy.spec.merging import MergingRecord, tokens_after
from corp_deploy.traced.models.module import parameters, tracing
from corp_deploy.traced.models.offered import sites_by_name, sites_of
from corp_deploy.traced.models.position_means import count_macs_of_means
from corp_deploy.traced.models.sites import Currency
from corp_deploy.traced.models.token_merging import TokenMerge, find_merges, token_similarity

from . import traced_model
from .counting import count_macs
from .family import named_outputs_of, output_ports

ELSEWHERE = "all else"
_ROUNDED = 1e-3  # the largest share of a total that rounding of its parts leaves over


def traced_rows(model: nn.Module, macs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two lists of rows of parameters and MACs: of all sites, reducible or not, and of all other parts.

    `macs` are those of the model. A site's costs are those of the layers that get narrower with it.
    """
    found, offered = tracing(model), sites_of(model)
    by_name = {site.name: site for site in offered.every}
    reasons = {refusal.name: refusal.reason for refusal in offered.refused}
    rows: list[dict[str, Any]] = []
    named = {name: groups for name, groups in sites_by_name(found).items() if name in by_name or name in reasons}
    for name, groups in named.items():
        words = by_name[name].describe() if name in by_name else f"{groups.kind} {groups.size}"
        own = {"parameters": found.shares.parameters.alone[groups.key], "macs": found.shares.macs.alone[groups.key]}
        rows.append({"site": name, **own, "width": words, "reason": reasons.get(name, "")})
    rest = {"parameters": parameters(model), "macs": macs}
    left = {key: total - sum(row[key] for row in rows) for key, total in rest.items()}
    return rows, _fixed_rows(model, [groups.key for groups in named.values()], left)


def _fixed_rows(model: nn.Module, keys: Collection[str], left: Mapping[str, int]) -> list[dict[str, Any]]:
    shares = tracing(model).shares
    macs = _by_part(shares.macs.without(keys))
    first = {each: name for name, each in model.named_parameters()}
    # A parameter under several names counts under the first one, whichever name the program has.
    every = _by_part({name: each.numel() for name, each in model.named_parameters()})
    renamed = {name: first[each] for name, each in model.named_parameters(remove_duplicate=False)}
    of_all, of_rest = (
        _by_part({renamed.get(name, name): value for name, value in shares.parameters.without(some).items()})
        for some in ((), keys)
    )
    of_sites = of_all - of_rest
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
    """Return figures by name, rounded to whole numbers whose sum is the total.

    A difference from rounding goes to the largest figure, a larger one to a figure of its own, ELSEWHERE.
    """
    whole = {name: round(value) for name, value in figures.items()}
    over = total - sum(whole.values())
    largest = max(whole, key=lambda name: whole[name], default="")
    if largest and abs(over) < max(_ROUNDED * total, whole[largest] / 100) and whole[largest] + over >= 0:
        return whole | {largest: whole[largest] + over}
    return whole | {ELSEWHERE: over}


def _by_part(figures: Mapping[str, float]) -> Counter[str]:
    parts = Counter[str]()
    for name, value in figures.items():
        parts[_part(name)] += value  # type: ignore[assignment]  # sums of shares
    return parts


def _part(name: str) -> str:
    """Return the part of the model that has a module or a parameter: its path up to the number of a block."""
    path = re.sub(r"\.(weight|bias|gamma)$", "", name).split(".")
    before = [*takewhile(lambda word: not word.isdigit(), path)]
    return ".".join(before[:2]) or ELSEWHERE


def _reason(model: nn.Module, part: str) -> str:
    """Return the reason why the most of a part's channels can't be removed; empty if all of them can."""
    stays = [each for each in tracing(model).analysis.stays if _part(each.name) == part]
    return max(stays, key=lambda each: each.count).reason if stays else ""


def fixed_shares(model: nn.Module, currency: Currency, whole: Mapping[str, str]) -> list[tuple[str, float, str]]:
    """Return what can't get narrower: its name, its share of the model's cost and the reason, largest share first.

    These are sites that can't be reduced, sites that stay `whole` for the reasons given by their names, and parts of
    the model that are no site.
    """
    own, named = tracing(model), sites_by_name(tracing(model))
    layers = own.shares.macs if currency == "macs" else own.shares.parameters
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in {**whole, **{each.name: each.reason for each in sites_of(model).refused}}.items():
        reasons[reason].append(name)
    rest = layers.of_others({site.groups.key for site in sites_of(model).every if site.name not in whole})
    of_sites = [
        (
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}",
            sum(rest.alone[named[name].key] for name in names),
            reason,
        )
        for reason, names in reasons.items()
    ]
    parts = _by_part(rest.without({groups.key for groups in named.values()}))
    every = [
        *of_sites,
        *((name, value, _reason(model, name) or "it is part of no site") for name, value in parts.items()),
    ]
    total = sum(cost for cost, _ in layers.every)
    return [(name, value / total, why) for name, value, why in sorted(every, key=lambda each: -each[1]) if value > 0]


def stays_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return rows (reason, layers, count) of unremovable channels, one for reasons that differ in numbers alone."""
    rows = dict[str, dict[str, Any]]()
    for stay in tracing(model).analysis.stays:
        row = rows.setdefault(re.sub(r"\d+", "0", stay.reason), {"reason": stay.reason, "layers": [], "count": 0})
        row["layers"].append(stay.name.removesuffix(".weight"))
        row["count"] += stay.count
    return [*rows.values()]


def merging_record(model: nn.Module) -> MergingRecord | None:
    """Return the record of a model's token merging for one input; None for a model that merges nothing."""
    merging = traced_model.merging_of(model)
    if merging is None:
        return None
    count = count_macs(model)
    if merging.in_stream:
        kinds = traced_model.token_kinds(model)
        protected = len(kinds) - kinds.count("patch")
        tokens = (len(kinds), *tokens_after(merging, len(kinds), protected))
    else:
        mlps = traced_model.token_mlps(model)
        protected, tokens = mlps[0].protected, tuple(mlp.tokens for mlp in mlps)
    positions = count_macs_of_means(traced_model.tracing(model).running)
    return MergingRecord(
        **merging.as_json() | {"schedule": merging.schedule},
        protected=protected,
        tokens=tokens,
        macs=count.macs,
        macs_of_merging=sum(map(count.within, find_merges(model))) + positions,
        macs_with_all_tokens=count_macs(traced_model.with_merging(model, None)).macs,
    )


def inspection_of_model(model: nn.Module) -> dict[str, Any]:
    """Return a report by key: totals, rows of sites, fixed parts and unremovable channels, outputs, and merging."""
    count, merging = count_macs(model), merging_record(model)
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
        **({} if named_outputs_of(model) is None else {"outputs": outputs}),
        **({} if merging is None else {"merging": merging.as_json() | {"sentences": list(merging.sentences())}}),
    }


def _gap_B(falling_BA: Tensor, count: int) -> Tensor:
    """Return the gap [B] between the value number `count` of each falling row and the next; infinite without a next."""
    if count >= falling_BA.shape[1]:
        return torch.full(falling_BA.shape[:1], torch.inf, device=falling_BA.device)
    return falling_BA[:, count - 1] - falling_BA[:, count]


def _match_margins(merge: TokenMerge, x_BNC: Tensor, compared: Tensor, sizes_BN: Tensor | None) -> Tensor:
    """Return the least margin [B] of merging by similarity, in cosines, or in distances over the tokens' spread.

    It is the smaller of the gap between merged and kept tokens, and the least gap between the best and the second best
    match of a merged token.
    """
    count, alike_BAD = merge.count, token_similarity(merge.metric, x_BNC, compared, sizes_BN, merge.protected)
    if merge.metric in ("ward", "attended"):
        # Distances, and their rounding errors, scale with the mean squared distance of tokens from their mean.
        free_BNC = x_BNC[:, merge.protected :].float()
        spread_B = (free_BNC - free_BNC.mean(dim=1, keepdim=True)).square().sum(dim=-1).mean(dim=1).clamp(min=1e-30)
        alike_BAD = alike_BAD / spread_B[:, None, None]
    if merge.metric == "attended":
        alike_BAD = alike_BAD / (2.0 * compared.float().sqrt().mean(dim=1)[:, None, None])
    falling_BA, order_BA = alike_BAD.amax(dim=-1).sort(dim=1, descending=True, stable=True)
    gap_B = _gap_B(falling_BA, count)
    if alike_BAD.shape[2] < 2:
        return gap_B
    two_BA2 = alike_BAD.topk(2, dim=-1).values
    matches_BR = (two_BA2[..., 0] - two_BA2[..., 1]).gather(1, order_BA[:, :count])
    return torch.minimum(gap_B, matches_BR.amin(dim=1))


def choice_margins(merge: TokenMerge, x_BNC: Tensor, compared: Tensor, sizes_BN: Tensor | None) -> Tensor:
    """Return the least margin [B] of one merge's choices in the tokens `x_BNC`, each merged from `sizes_BN` tokens."""
    if merge.how != "drop":
        return _match_margins(merge, x_BNC, compared, sizes_BN)
    # The gap between dropped and kept tokens, as a share of the attention to the last dropped token.
    rising_BN = compared[:, merge.protected :].float().sort(dim=1).values
    return -_gap_B(rising_BN, merge.count) / rising_BN[:, merge.count - 1].clamp(min=1e-30)


def merge_margins(model: nn.Module, inputs: Inputs) -> Tensor | None:
    """Return the least margin of all choices in the model, for each input [B]; None where nothing is merged."""
    if traced_model.merging_of(model) is None:
        return None
    every = list[Tensor]()

    def look(merge: nn.Module, entering: tuple[Tensor, Tensor | None, Tensor | None, Tensor]) -> None:
        assert isinstance(merge, TokenMerge), merge
        every.append(choice_margins(merge, entering[0], entering[3], entering[1]))

    with ExitStack() as stack, torch.inference_mode():
        for merge in find_merges(model).values():
            stack.callback(merge.register_forward_pre_hook(look).remove)
        run_model(model, inputs)
    least = [torch.full((input_count(inputs),), torch.inf), *every]
    # Each window of an image has choices of its own.
    return torch.stack([each.reshape(input_count(inputs), -1).amin(dim=1).to("cpu") for each in least]).amin(dim=0)
