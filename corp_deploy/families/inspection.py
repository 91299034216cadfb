"""What a model is made of and where its cost lies, for people and machines."""

from collections import Counter
from typing import Any

from torch import nn

from . import timm_vit as vit
from .model_cost import counted, parameters


def _width(part: vit.ChannelSite | vit.HeadSite) -> str:
    if isinstance(part, vit.ChannelSite):
        return f"hidden {part.hidden}"
    return f"{part.heads} heads, qk {part.qk}, v {part.v}, {part.geometry}"


def _reason(part: vit.ChannelSite | vit.HeadSite) -> str:
    return "" if isinstance(part, vit.ChannelSite) else part.keeps_qk


def _owner(path: str, sites: set[str]) -> str:
    """The site, or else the fixed part of the model, that a module or a parameter belongs to."""
    words = path.split(".")
    above = [".".join(words[:depth]) for depth in range(len(words), 0, -1)]
    return next((name for name in above if name in sites or name in vit.STEMS), words[0] or vit.WHOLE)


def _rows(model: nn.Module, macs_by_module: dict[str, int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for every site, supported or not, and one for everything else that has parameters or multiplies."""
    found = vit.sites(model)
    sites = {part.name: {"width": _width(part), "reason": _reason(part)} for part in found.every}
    sites |= {refusal.name: {"width": "-", "reason": refusal.reason} for refusal in found.refused}
    macs: Counter[str] = Counter()
    for path, count in macs_by_module.items():
        macs[_owner(path, set(sites))] += count
    held: Counter[str] = Counter()
    for path, parameter in model.named_parameters():
        held[_owner(path, set(sites))] += parameter.numel()
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    rows = [
        {"site": name, "parameters": held[name], "macs": macs[name], **sites[name]}
        for name in sorted(sites, key=order.__getitem__)
    ]
    fixed = [name for name in dict.fromkeys((*held, *macs)) if name not in sites]
    return rows, [{"name": name, "parameters": held[name], "macs": macs[name]} for name in fixed]


def inspection_of_model(model: nn.Module) -> dict[str, Any]:
    """Sites with widths, parameters and MACs of one image and the reason where nothing can be reduced; the same figures
    of everything that is no site; totals, which are the sums of both.
    """
    count = counted(model)
    sites, fixed = _rows(model, dict(count.by_module))
    return {
        "architecture": type(model).__name__,
        "depth": vit.depth(model),
        "parameters": parameters(model),
        "macs": count.macs,
        "sites": sites,
        "fixed": fixed,
    }
