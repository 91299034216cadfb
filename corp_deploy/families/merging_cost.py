"""What merging makes of a model, counted."""

from torch import nn

from .family import family_of
from .merging import tokens_after
from .merging_record import MergingRecord
from .model_cost import counted
from .token_merging import merges_in


def merging_record(model: nn.Module) -> MergingRecord | None:
    """Counted for one input; None for a model that merges nothing."""
    family = family_of(model)
    merging = family.merging_of(model)
    if merging is None:
        return None
    kinds, count = family.token_kinds(model), counted(model)
    protected = len(kinds) - kinds.count("patch")
    return MergingRecord(
        **merging.as_json() | {"schedule": merging.schedule},
        protected=protected,
        tokens=(len(kinds), *tokens_after(merging, len(kinds), protected)),
        macs=count.macs,
        macs_of_merging=sum(map(count.within, merges_in(model))),
        macs_with_all_tokens=counted(family.with_merging(model, None)).macs,
    )
