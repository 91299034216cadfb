"""What a model is made of and where its cost lies, for people and machines."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from corp_deploy.traced.models.inspection import fixed_shares as fixed_shares
from corp_deploy.traced.models.inspection import stays_of, traced_rows

from . import traced_model
from .family import output_ports, outputs_of
from .merging_cost import merging_record
from .model_cost import counted, parameters


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
