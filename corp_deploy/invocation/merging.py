"""Token merging as a command or a recipe asks for it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corp_deploy.families.merging import How, Metric
from ground.errors import BadInput

from .reduction_table import MERGING

OUTPUTS = ("merged", "unmerged")
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergingChoice:
    """Fields have the names of the options; `merge_tokens` is how many tokens each block merges away, as people write
    it, None where none are. How many a model's blocks can merge away is asked where the model is. AUTO leaves it to a
    budget.
    """

    merge_tokens: str | None = None
    merge_metric: Metric = "ward"
    merge_how: How = "merge"
    merge_outputs: str = "merged"

    def __post_init__(self) -> None:
        if self.merge_how == "drop" and self.merge_outputs == "unmerged":
            raise BadInput("--merge-outputs unmerged: tokens that were dropped have no value to give back; merge them")
        if self.merge_how == "drop" and self.is_auto:
            raise BadInput("--merge-tokens auto weighs what merging loses; with --merge-how drop give a schedule")

    @property
    def is_auto(self) -> bool:
        """Whether a budget chooses the schedule."""
        return self.merge_tokens == AUTO

    @property
    def asked(self) -> bool:
        """Whether anything is merged."""
        return self.merge_tokens is not None

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        """Raise BadInput for one of these options, asked for by name, that nothing here honours."""
        MERGING.refuse([("", self.merge_how if self.asked else "none")], options)


def merging_from_options(options: Mapping[str, Any]) -> MergingChoice:
    """What these values of the options ask for; those left out have their defaults."""
    return MergingChoice(**{name: options[name] for name in MergingChoice.__dataclass_fields__ if name in options})
