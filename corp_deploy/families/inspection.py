"""What a model is made of and where its cost lies, for people and machines."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from .family import family_of, output_ports, outputs_of
from .merging_cost import merging_record
from .model_cost import counted, parameters
from .seam import Family
from .token_merging import merges_in
from .traced_inspection import stays_of, traced_rows
from .traced_module import TracedModule

WHOLE = "forward"  # what a model's own forward pass does between its modules


def _owner(path: str, sites: set[str], fixed: Sequence[str]) -> str:
    """The site, or else the fixed part of the model, that a module or a parameter belongs to."""
    words = path.split(".")
    above = [".".join(words[:depth]) for depth in range(len(words), 0, -1)]
    return next((name for name in above if name in sites or name in fixed), words[0] or WHOLE)


def _rows(
    family: Family, model: nn.Module, macs_by_module: dict[str, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for every site, supported or not, and one for everything else that has parameters or multiplies."""
    if isinstance(model, TracedModule):
        return traced_rows(model, sum(macs_by_module.values()))
    offered = family.sites(model)
    sites = {site.name: {"width": site.words(), "reason": site.reason} for site in offered.every}
    sites |= {refusal.name: {"width": "-", "reason": refusal.reason} for refusal in offered.refused}
    # What merges tokens is no site, and costs something of its own.
    fixed_parts = (*family.FIXED_PARTS, *merges_in(model))
    macs: Counter[str] = Counter()
    for path, count in macs_by_module.items():
        macs[_owner(path, set(sites), fixed_parts)] += count
    held: Counter[str] = Counter()
    for path, parameter in model.named_parameters():
        held[_owner(path, set(sites), fixed_parts)] += parameter.numel()
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    rows = [
        {"site": name, "parameters": held[name], "macs": macs[name], **sites[name]}
        for name in sorted(sites, key=order.__getitem__)
    ]
    fixed = [name for name in dict.fromkeys((*held, *macs)) if name not in sites]
    return rows, [{"name": name, "parameters": held[name], "macs": macs[name]} for name in fixed]


def _outputs(model: nn.Module, shapes: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    ports = zip(output_ports(model), shapes, strict=True)
    return [{"name": port.name, "role": port.role, "shape": list(shape)} for port, shape in ports]


def inspection_of_model(model: nn.Module) -> dict[str, Any]:
    """Sites with widths, parameters and MACs of one input and the reason where nothing can be reduced; the same figures
    of everything that is no site; totals, which are the sums of both.
    """
    family, count = family_of(model), counted(model)
    merging = merging_record(model)
    sites, fixed = _rows(family, model, dict(count.by_module))
    return {
        "architecture": type(model).__name__,
        "depth": family.depth(model),
        "parameters": parameters(model),
        "macs": count.macs,
        "sites": sites,
        "fixed": fixed,
        **({"stays": stays_of(model)} if isinstance(model, TracedModule) else {}),
        **({} if outputs_of(model) is None else {"outputs": _outputs(model, count.shapes)}),
        **({} if merging is None else {"merging": merging.as_json() | {"sentences": list(merging.sentences())}}),
    }
