"""What merging makes of a model, in numbers and in words: tokens by block, its share of the multiply-adds. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from corp_deploy.traced.models.merging import Merging, Metric

COMPARED: Mapping[Metric, str] = {
    "ward": "what merging them changes in the residual stream",
    "attended": "what merging them changes in the residual stream, and the class token's attention",
    "stream": "the cosine of the residual stream",
    "keys": "the cosine of the keys of all heads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergingRecord(Merging):
    """A schedule, and what it comes to.

    `tokens`: those that enter the first block, then those behind each; `protected` of them are never merged. Multiply-
    adds of one input: `macs` of the model, `macs_of_merging` those of them that compare and merge tokens, and
    `macs_with_all_tokens` at the same widths with nothing merged.
    """

    protected: int
    tokens: tuple[int, ...]
    macs: int
    macs_of_merging: int
    macs_with_all_tokens: int

    @property
    def verb(self) -> str:
        """What happens to tokens."""
        return "merged" if self.how == "merge" else "dropped"

    @property
    def rows(self) -> tuple[tuple[int, int, int, int], ...]:
        """By block: its place, the tokens that enter it, those merged away, those behind it."""
        each = zip(pairwise(self.tokens), self.schedule, strict=True)
        return tuple((block, entering, count, behind) for block, ((entering, behind), count) in enumerate(each))

    def sentences(self) -> tuple[str, ...]:
        """In plain words, the first letter small and no full stop."""
        which = (
            f"merges the tokens that are most alike by {COMPARED[self.metric]}"
            if self.how == "merge"
            else "drops the tokens that the class token attends to least"
        )
        share = self.macs / self.macs_with_all_tokens
        kept = f"{self.protected} of them protected" if self.protected else "none of them protected"
        outputs = "the outputs stand unmerged: each source token has the value of the token that it was merged into"
        return (
            f"between attention and MLP each block {which}: {self.tokens[0]} tokens become {self.tokens[-1]}, {kept}",
            f"this takes {share:.1%} of the multiply-adds of the same widths with all tokens, "
            f"{self.macs_of_merging / self.macs:.2%} of them to compare and merge",
            *((outputs,) if self.unmerged else ()),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
