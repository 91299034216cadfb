"""How many of the sites that a reduction was to make smaller it does, and what stands in the way of the others."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from corp_deploy.families.widths import Widths
from corp_deploy.traced.models.sites import Sites
from ground.errors import BadInput

from .kind import Kind
from .kinds import KINDS, kind_of
from .method import Method

NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Sites by name: made smaller, refused with the reason, and left whole by the method, the alignment or a budget."""

    reduced: tuple[str, ...]
    refused: Mapping[str, str]
    left: tuple[str, ...]

    @property
    def verdict(self) -> str:
        return f"{len(self.reduced)} of {len(self.reduced) + len(self.refused) + len(self.left)} sites reduced"

    def as_json(self) -> dict[str, Any]:
        """The verdict and what it rests on, as plain JSON values."""
        return {
            "verdict": self.verdict,
            "reduced": len(self.reduced),
            "sites": len(self.reduced) + len(self.refused) + len(self.left),
            "refused": dict(self.refused),
            "left_whole": list(self.left),
        }


def coverage(sites: Sites, method: Method, widths: Widths, *, by_site: bool) -> Coverage:
    """What these widths do to the sites that were to shrink: all of them by a
    budget (`by_site`), else those that a sparsity asks for, or where none does, all.
    """
    asks_nothing = not method.asks_to_remove

    def counts(kind: Kind) -> bool:
        return by_site or asks_nothing or bool(kind.sparsity(method))

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


def _by_reason(refused: Mapping[str, str]) -> str:
    sites = defaultdict(list)
    for site, reason in refused.items():
        sites[reason].append(site)
    return "\n".join(
        f"  {', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if len(names) > NAMED else ''}: {reason}"
        for reason, names in sites.items()
    )


def _multiples(method: Method) -> Iterator[str]:
    """The multiples of the widths that are asked to shrink."""
    if method.mlp_sparsity:
        yield f"hidden {method.align_hidden}"
    if method.attention_sparsity:
        yield f"head {method.align_head}"
    if method.heads_sparsity:
        yield "whole heads 1"
    if method.conv_sparsity or method.residual_sparsity:
        yield f"conv {method.align_conv}"


def require_as_asked(covered: Coverage, method: Method) -> None:
    """Raise BadInput where sparsities would remove less than asked because sites are refused, or nothing at all."""
    if covered.refused and method.asks_to_remove:
        raise BadInput(
            f"less than was asked for can be removed, {covered.verdict}; these can't be:\n"
            f"{_by_reason(covered.refused)}\n--allow-partial (recipes: allow_partial = true) reduces the others"
        )
    if not covered.reduced and method.asks_to_remove:
        why = (
            "this preset's method reduces MLPs only"
            if method.attention_sparsity and method.qk_recovery == "keep"
            else f"widths are rounded to multiples ({', '.join(_multiples(method))})"
        )
        raise BadInput(
            f"nothing would be removed, {covered.verdict}: {why}; ask for more, change --align or --preset, or give "
            "--allow-partial (recipes: allow_partial = true) to write the model all the same"
        )
