"""Options of token merging. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from corp_deploy.spec.merging import How, Metric
from ground.errors import BadInput

from .option import Record, option
from .reduction_table import MERGING
from .values import ParsedText

AUTO = "auto"
SCHEDULE = ParsedText(
    span="R|SCHEDULE|SHARE|auto",
    expected="how many tokens each block merges away: 12, 'grow:36', '0,4,8,...', 'auto', or '30%' of each MLP's",
    kind=str,
    read=str,
    or_whole=True,
)


@dataclass(frozen=True, kw_only=True)
class MergedStatistics(Record, heading="Merged tokens"):
    """Token merging during calibration: schedule, metric, merge or drop. Raises BadInput for `auto` with `drop`."""

    merge_tokens: int | str | None = option(
        SCHEDULE,
        help="Tokens that each block merges away between attention and MLP (ToMe): 12 in each, grow:36 for 0 in "
        "the first to 36 in the last, a number for every block (0,4,8,...), or auto with --macs or --latency: "
        "chosen by the error of the outputs. With --merge-how mlp the share of each MLP's tokens: 30%.",
    )
    merge_metric: Metric = option(
        default="ward",
        help="How tokens are compared: ward, by how much a merge changes the residual stream after the attention "
        "(sizes times squared distance); attended, by that change, with tokens that the class token attends to merged "
        "last; stream or keys, by the cosine of that stream or of the concatenated keys of all heads. --merge-tokens "
        "auto tries ward and attended.",
    )
    merge_how: How = option(
        default="merge",
        help="Merge similar tokens; drop those that the class token attends to least; or merge for each MLP alone, "
        "within windows, and give every token its result (mlp), which any block of a vision model allows.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_how == "drop" and self.auto_merging:
            raise BadInput("--merge-tokens auto weighs what merging loses; with --merge-how drop give a schedule")
        if self.merge_how == "mlp" and self.auto_merging:
            raise BadInput("--merge-tokens auto chooses tokens of the stream; with --merge-how mlp give a share: 30%")
        if self.merges == "mlp" and not self.reduces:
            raise BadInput(
                "--merge-how mlp changes no statistics; calibrate without --merge-tokens, and give it to reduce"
            )

    @property
    def auto_merging(self) -> bool:
        return self.merge_tokens == AUTO

    @property
    def schedule(self) -> str | None:
        """The schedule as a text, such as '12', 'grow:36' or 'auto'; None without merging."""
        return None if self.merge_tokens is None else str(self.merge_tokens)

    @property
    def unmerged(self) -> bool:
        return False

    @property
    def reduces(self) -> bool:
        """True for options of a reduced model, which may merge tokens for MLPs alone."""
        return False

    @property
    def merges(self) -> str:
        return "none" if self.merge_tokens is None else self.merge_how

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        MERGING.refuse([("", self.merges)], options)

    @property
    def command_options(self) -> dict[str, Any]:
        return MERGING.supported(self.merges, super().command_options)

    @property
    def of_statistics(self) -> "MergedStatistics":
        """The merging under which moments are collected: none if `auto` chooses it afterwards, or for MLPs alone."""
        chosen_later = self.auto_merging or self.merges == "mlp"
        return MergedStatistics() if chosen_later else MergedStatistics.from_options(self.values)


@dataclass(frozen=True, kw_only=True)
class MergingChoice(MergedStatistics):
    """Token merging in a reduced model, and whether it outputs merged tokens or one for each original token."""

    merge_outputs: Literal["merged", "unmerged"] = option(
        default="merged",
        help="For a model that outputs tokens: the merged ones, or one for every original token, with the value it "
        "was merged into.",
    )

    @property
    def unmerged(self) -> bool:
        return self.merge_outputs == "unmerged"

    @property
    def reduces(self) -> bool:
        return True
