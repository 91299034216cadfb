"""How many of the sites that a reduction was to make smaller it does, and what stands in the way of the others."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corp_deploy.families import timm_vit as vit
from corp_deploy.families.widths import HeadWidths, Widths
from ground.errors import BadInput

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


def _asks(method: Method, site: str) -> bool:
    """Whether uniform sparsities ask for anything to be removed there."""
    return bool(method.mlp_sparsity if site.endswith(".mlp") else method.attention_sparsity)


def _shrinks(site: vit.ChannelSite | vit.HeadSite, width: int | HeadWidths | None) -> bool:
    if width is None:
        return False
    return width != (site.hidden if isinstance(site, vit.ChannelSite) else site.widths)


def coverage(found: vit.Sites, method: Method, widths: Widths, *, by_site: bool) -> Coverage:
    """What these widths do to the sites that were to shrink: all of them by a budget (`by_site`), else those that a
    sparsity asks for, or where none does, all.
    """
    asks_nothing = not (method.mlp_sparsity or method.attention_sparsity)

    def counts(site: str) -> bool:
        return by_site or asks_nothing or _asks(method, site)

    refused = {site: refusal.reason for refusal in found.refused for site in refusal.sites if counts(site)}
    reduced, left = [], []
    for part in found.every:
        if _shrinks(part, widths.get(part.name)):
            reduced.append(part.name)
        elif isinstance(part, vit.HeadSite) and part.keeps_qk and method.reduces_attention and counts(part.name):
            refused[part.name] = f"{part.keeps_qk}; --heads square reduces its values"
        elif counts(part.name):
            left.append(part.name)
    return Coverage(reduced=tuple(reduced), refused=refused, left=tuple(left))


def _by_reason(refused: Mapping[str, str]) -> str:
    sites = defaultdict(list)
    for site, reason in refused.items():
        sites[reason].append(site)
    return "\n".join(
        f"  {', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if len(names) > NAMED else ''}: {reason}"
        for reason, names in sites.items()
    )


def require_as_asked(covered: Coverage, method: Method) -> None:
    """Raise BadInput where sparsities would remove less than asked because sites are refused, or nothing at all."""
    if covered.refused and (method.mlp_sparsity or method.attention_sparsity):
        raise BadInput(
            f"less than was asked for can be removed, {covered.verdict}; these can't be:\n"
            f"{_by_reason(covered.refused)}\n--allow-partial (recipes: allow_partial = true) reduces the others"
        )
    if not covered.reduced and (method.mlp_sparsity or method.attention_sparsity):
        why = (
            "this preset's method reduces MLPs only"
            if method.attention_sparsity and method.qk_recovery == "keep"
            else f"widths are rounded to multiples (hidden {method.align_hidden}, head {method.align_head})"
        )
        raise BadInput(
            f"nothing would be removed, {covered.verdict}: {why}; ask for more, change --align or --preset, or give "
            "--allow-partial (recipes: allow_partial = true) to write the model all the same"
        )
