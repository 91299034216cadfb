"""What merging makes of a model, counted."""

from torch import nn

from corp_deploy.traced.models.merging import tokens_after
from corp_deploy.traced.models.token_merging import merges_in

from . import traced_model
from .merging_record import MergingRecord
from .model_cost import counted


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
