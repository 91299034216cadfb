"""The share of the requested sites that a reduction made smaller, and the reasons against the others."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from corp_deploy.spec.widths import Widths
from corp_deploy.traced.models.sites import Sites
from ground.errors import BadInput

from .kinds import KINDS, Kind, kind_of
from .method import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Sites by name: made smaller, refused with the reason, or left whole by the method, the alignment or a budget."""

    reduced: tuple[str, ...]
    refused: Mapping[str, str]
    left: tuple[str, ...]

    @property
    def sites(self) -> int:
        return len(self.reduced) + len(self.refused) + len(self.left)

    @property
    def verdict(self) -> str:
        return f"{len(self.reduced)} of {self.sites} sites reduced"

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "reduced": len(self.reduced),
            "sites": self.sites,
            "refused": dict(self.refused),
            "left_whole": list(self.left),
        }


def coverage(sites: Sites, method: Method, widths: Widths, *, by_site: bool) -> Coverage:
    """Sort the sites that were to shrink into those reduced by these widths, those refused, and those left whole.

    With a budget (`by_site`) all sites were to shrink; else those with a sparsity, or all if none has one.
    """

    def counts(kind: Kind) -> bool:
        return by_site or not method.asks_to_remove or bool(kind.sparsity(method))

    refused = {each.name: each.reason for each in sites.refused if counts(KINDS[each.kind])}
    reduced, left = list[str](), list[str]()
    for site in sites.every:
        kind = kind_of(site)
        if widths.get(site.name, site.width) != site.width:
            reduced.append(site.name)
        elif (refusal := kind.refusal(site, method)) and counts(kind):
            refused[site.name] = refusal
        elif counts(kind):
            left.append(site.name)
    return Coverage(reduced=tuple(reduced), refused=refused, left=tuple(left))


def by_reason(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each reason with a text: the first three names that it applies to, and the number of further ones."""
    names = defaultdict[str, list[str]](list)
    for name, reason in reasons.items():
        names[reason].append(name)
    for reason, own in names.items():
        yield reason, ", ".join(own[:3]) + (f" and {len(own) - 3} more" if len(own) > 3 else "")


def require_as_asked(covered: Coverage, method: Method) -> None:
    """Raise BadInput if refused sites make a reduction smaller than the sparsities ask, or nothing is removed."""
    if covered.refused and method.asks_to_remove:
        refused = "\n".join(f"  {names}: {reason}" for reason, names in by_reason(covered.refused))
        raise BadInput(
            f"less can be removed than was asked for, {covered.verdict}; refused:\n"
            f"{refused}\n--allow-partial (recipes: allow_partial = true) reduces the others"
        )
    if not covered.reduced and method.asks_to_remove:
        multiples = {
            f"hidden {method.align_hidden}": method.mlp_sparsity,
            f"head {method.align_head}": method.attention_sparsity,
            "whole heads 1": method.heads_sparsity,
            f"conv {method.align_conv}": method.conv_sparsity or method.residual_sparsity,
        }
        why = (
            "this preset's method reduces MLPs only"
            if method.attention_sparsity and method.qk_recovery == "keep"
            else f"widths are rounded to multiples ({', '.join(name for name, asked in multiples.items() if asked)})"
        )
        raise BadInput(
            f"nothing would be removed, {covered.verdict}: {why}; remove more, change --align or --preset, or give "
            "--allow-partial (recipes: allow_partial = true) to write the model all the same"
        )
