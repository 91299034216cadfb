"""Settings and schedules of token merging, token counts behind each block, and records of a merged model's costs.

Token merging (Bolya et al., ToMe, arXiv 2210.09461): between the attention and the MLP of a block the r most similar
tokens are merged into others, so that every later layer computes r tokens fewer.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from ground.errors import BadInput
from ground.quantity import quoted

Metric = Literal["ward", "attended", "stream", "keys"]
How = Literal["merge", "drop", "mlp"]
MOST_BLOCKS, MOST_TOKENS = 256, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """The settings of token merging between the attention and the MLP of each block, or for MLPs alone.

    `schedule`: the number of tokens merged away per block, or per MLP. `metric` compares two tokens: `ward` by the rise
    of the within-cluster sum of squares in the residual stream behind the attention (Ward 1963), `attended` by that
    times the sum of the roots of the class token's attention to both, `stream` and `keys` by the cosine of that stream
    or of all heads' keys. `how`: `merge` takes means weighted by the number of source tokens, `drop` removes the tokens
    that the class token attends to least, `mlp` takes means for each MLP alone, compared by its input in windows of the
    map, and gives every token its result. `unmerged`: outputs have a row per source token, with the value of its merged
    token.
    """

    schedule: tuple[int, ...]
    metric: Metric = "ward"
    how: How = "merge"
    unmerged: bool = False

    def __post_init__(self) -> None:
        if not self.schedule or len(self.schedule) > MOST_BLOCKS:
            raise BadInput(f"merging: a schedule of {len(self.schedule)} entries, expected one for each block")
        for block, count in enumerate(self.schedule):
            if type(count) is not int or not 0 <= count <= MOST_TOKENS:
                raise BadInput(f"merging: block {block}: {quoted(str(count))} tokens, expected a whole number from 0")
        if self.how == "mlp" and (self.unmerged or self.metric != "ward"):
            raise BadInput("merging: for MLPs alone tokens are compared by ward, and outputs always have every token")
        if self.how == "drop" and self.unmerged:
            raise BadInput("merging: dropped tokens have no value to restore; merge instead, or drop without unmerging")

    @property
    def in_stream(self) -> bool:
        """True if tokens merge in the residual stream, so that every later layer computes fewer."""
        return self.how != "mlp"

    @property
    def compares_attention(self) -> bool:
        """True if keys (`metric` keys) or attention weights (`metric` attended, `how` drop) select the tokens."""
        return self.how == "drop" or self.metric in ("attended", "keys")

    def as_json(self) -> dict[str, Any]:
        """Return the four fields by name, as config.json and lineages record them."""
        return {"schedule": list(self.schedule), "metric": self.metric, "how": self.how, "unmerged": self.unmerged}

    def describe(self) -> str:
        """Return a phrase such as `merged: 12 in each block, compared by ward`, or with one number per block."""
        if not self.in_stream:
            return f"merged for MLPs alone: {','.join(map(str, self.schedule))}"
        alike = len(set(self.schedule)) == 1
        counts = f"{self.schedule[0]} in each block" if alike else ",".join(map(str, self.schedule))
        by = "" if self.how == "drop" else f", compared by {self.metric}"
        return f"{'dropped' if self.how == 'drop' else 'merged'}: {counts}{by}{', unmerged' if self.unmerged else ''}"


def most_merged(how: How, tokens: int, protected: int) -> int:
    """Return the most tokens that one block can merge away: half of the unprotected ones, all but one with drop."""
    free = max(0, tokens - protected)
    return free // 2 if how == "merge" else max(0, free - 1)


def tokens_after(merging: Merging, tokens: int, protected: int) -> tuple[int, ...]:
    """Return the numbers of tokens behind each block; raise BadInput for a block that would merge more than it can."""
    behind = []
    for block, count in enumerate(merging.schedule):
        most = most_merged(merging.how, tokens, protected)
        if count > most:
            raise BadInput(
                f"merging: block {block} has {tokens} tokens, {protected} of them protected, so it can {merging.how} "
                f"{most} at most, got {count}; merge fewer there or in the blocks before"
            )
        tokens -= count
        behind.append(tokens)
    return tuple(behind)


def cap_schedule(schedule: tuple[int, ...], how: How, tokens: int, protected: int) -> tuple[int, ...]:
    """Return a schedule whose counts are at most what each block can merge away of the tokens that reach it."""
    fitting = []
    for count in schedule:
        fitting.append(min(count, most_merged(how, tokens, protected)))
        tokens -= fitting[-1]
    return tuple(fitting)


def grow_schedule(last: int, depth: int) -> tuple[int, ...]:
    """Return a schedule that grows evenly from 0 in the first block to `last` in the last one."""
    return tuple(round(last * block / max(1, depth - 1)) for block in range(depth))


def schedule_from_text(text: str, depth: int) -> tuple[int, ...]:
    """Read a schedule: `12` for each block, `grow:36` for 0 to 36, or a number per block; raise BadInput for others."""
    number = text.removeprefix("grow:")
    parts = [part.strip() for part in number.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts) or len(parts) not in (1, depth):
        raise BadInput(
            f"{quoted(text)}: expected how many tokens each block merges away: one number for all (12), grow:36 for 0 "
            f"in the first block to 36 in the last, or {depth} numbers (0,4,8,...)"
        )
    if number != text:
        if len(parts) > 1:
            raise BadInput(f"{quoted(text)}: grow takes one number, that of the last block: grow:36")
        return grow_schedule(int(number), depth)
    return tuple(map(int, parts)) if len(parts) > 1 else (int(number),) * depth


def shares_from_text(text: str, count: int) -> tuple[float, ...]:
    """Read the share of tokens that each of `count` MLPs merges away: `30%`, or one share per MLP."""
    found = [re.fullmatch(r"\s*(\d\d?)%\s*", part, re.ASCII) for part in text.split(",")]
    percents = [int(each[1]) for each in found if each is not None]
    if len(percents) != len(found) or max(percents) > 50 or len(percents) not in (1, count):
        raise BadInput(
            f"{quoted(text)}: expected the share of its tokens that each MLP merges away, 50% at most: one for all "
            f"(30%), or {count} of them (0%,20%,...)"
        )
    return tuple(percent / 100 for percent in percents) * (count if len(percents) == 1 else 1)


COMPARED: Mapping[Metric, str] = {
    "ward": "what merging them changes in the residual stream",
    "attended": "what merging them changes in the residual stream, and the class token's attention",
    "stream": "the cosine of the residual stream",
    "keys": "the cosine of the keys of all heads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergingRecord(Merging):
    """A merging with its token counts and multiply-adds of one input.

    `tokens`: the numbers that enter the first block and that leave each, or, with `how` mlp, those that enter each MLP;
    `protected` of them are never merged. `macs`: the multiply-adds of the model, `macs_of_merging` of them to compare
    and merge tokens; `macs_with_all_tokens`: those at the same widths without merging.
    """

    protected: int
    tokens: tuple[int, ...]
    macs: int
    macs_of_merging: int
    macs_with_all_tokens: int

    @property
    def verb(self) -> str:
        return "dropped" if self.how == "drop" else "merged"

    @property
    def unit(self) -> str:
        return "block" if self.in_stream else "MLP"

    @property
    def rows(self) -> tuple[tuple[int, int, int, int], ...]:
        """A row per block or MLP: its number, and the tokens that enter, are merged away, and are computed behind."""
        if not self.in_stream:
            counts = enumerate(zip(self.tokens, self.schedule, strict=True))
            return tuple((mlp, entering, count, entering - count) for mlp, (entering, count) in counts)
        each = zip(pairwise(self.tokens), self.schedule, strict=True)
        return tuple((block, entering, count, behind) for block, ((entering, behind), count) in enumerate(each))

    def sentences(self) -> tuple[str, ...]:
        """Return sentences, without capital and full stop, on token counts, multiply-adds and, if unmerged, outputs."""
        share = self.macs / self.macs_with_all_tokens
        cost = (
            f"this takes {share:.1%} of the multiply-adds of the same widths with all tokens, "
            f"{self.macs_of_merging / self.macs:.2%} of them to compare and merge"
        )
        if not self.in_stream:
            computed = sum(behind for *_, behind in self.rows)
            return (
                "each MLP merges the tokens that are most alike within each window of the map, and gives every token "
                f"the result of its merged one: {computed:,} instead of {sum(self.tokens):,} tokens pass the MLPs",
                cost,
            )
        which = (
            f"merges the tokens that are most alike by {COMPARED[self.metric]}"
            if self.how == "merge"
            else "drops the tokens that the class token attends to least"
        )
        kept = f"{self.protected} of them protected" if self.protected else "none of them protected"
        outputs = "the outputs stand unmerged: each source token has the value of the token that it was merged into"
        return (
            f"between attention and MLP each block {which}: {self.tokens[0]} tokens become {self.tokens[-1]}, {kept}",
            cost,
            *((outputs,) if self.unmerged else ()),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
