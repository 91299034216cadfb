"""What a model is made of, where its cost lies and what merging makes of it, counted, for people and machines."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from corp_deploy.traced.models.inspection import fixed_shares as fixed_shares
from corp_deploy.traced.models.inspection import stays_of, traced_rows
from corp_deploy.traced.models.merging import tokens_after
from corp_deploy.traced.models.token_merging import merges_in

from . import traced_model
from .counting import counted, parameters
from .family import output_ports, outputs_of
from .merging_record import MergingRecord


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


def _outputs(model: nn.Module, shapes: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    ports = zip(output_ports(model), shapes, strict=True)
    return [{"name": port.name, "role": port.role, "shape": list(shape)} for port, shape in ports]


def inspection_of_model(model: nn.Module) -> dict[str, Any]:
    """Sites with widths, parameters and MACs of one input and the reason where nothing can be reduced; the same figures
    of everything that is no site; totals, which are the sums of both.
    """
    count = counted(model)
    merging = merging_record(model)
    sites, fixed = traced_rows(model, count.macs)
    return {
        "architecture": type(model).__name__,
        "depth": traced_model.depth(model),
        "parameters": parameters(model),
        "macs": count.macs,
        "sites": sites,
        "fixed": fixed,
        "stays": stays_of(model),
        **({} if outputs_of(model) is None else {"outputs": _outputs(model, count.shapes)}),
        **({} if merging is None else {"merging": merging.as_json() | {"sentences": list(merging.sentences())}}),
    }
