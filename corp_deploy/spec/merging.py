"""Which tokens are merged away where: the values, their rules and the arithmetic of token counts; and what merging
makes of a model, in numbers and in words. No torch.

Token merging (Bolya et al., ToMe, arXiv 2210.09461): between the attention and the MLP of a block the r most alike
tokens are merged into others, so that every later product has r tokens fewer.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from ground.errors import BadInput
from ground.quantity import quoted

Metric = Literal["ward", "attended", "stream", "keys"]
How = Literal["merge", "drop"]
MOST_BLOCKS, MOST_TOKENS = 256, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """What happens between the attention and the MLP of each block.

    `schedule`: tokens merged away, an entry a block, 0 none. `metric`: how alike tokens are, by what merging them adds
    to the sum of squares within tokens of the stream behind the attention (Ward 1963), by that times the sum of the
    roots of what the class token attends to both with, or by the cosine of that stream or of the keys of all heads side
    by side. `how`: `merge` takes the mean of tokens that are alike, weighted by how
    many stand in each; with `drop` those go that the class token attends to least. `unmerged`: dense outputs, every
    source token has the value of the token that it was merged into. Raises BadInput for what is none.
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
        if self.how == "drop" and self.unmerged:
            raise BadInput("merging: dropped tokens have no value to restore; merge instead, or drop without unmerging")

    @property
    def compares_attention(self) -> bool:
        """Whether it asks attentions for their keys or for what they attend to."""
        return self.how == "drop" or self.metric in ("attended", "keys")

    def as_json(self) -> dict[str, Any]:
        """As config.json and lineages have it."""
        return {"schedule": list(self.schedule), "metric": self.metric, "how": self.how, "unmerged": self.unmerged}

    def describe(self) -> str:
        """For people: `grows from 0 to 36` is read off the numbers, so they stand there."""
        alike = len(set(self.schedule)) == 1
        counts = f"{self.schedule[0]} in each block" if alike else ",".join(map(str, self.schedule))
        by = "" if self.how == "drop" else f", compared by {self.metric}"
        return f"{'dropped' if self.how == 'drop' else 'merged'}: {counts}{by}{', unmerged' if self.unmerged else ''}"


def most_merged(how: How, tokens: int, protected: int) -> int:
    """Return how many of the tokens one block can merge away: half of the unprotected, in all but one when dropping."""
    free = max(0, tokens - protected)
    return free // 2 if how == "merge" else max(0, free - 1)


def tokens_after(merging: Merging, tokens: int, protected: int) -> tuple[int, ...]:
    """Return the tokens behind each block. Raises BadInput for a block that is to merge more than it can."""
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
    """The same, with no more in a block than it can merge away."""
    fitting = []
    for count in schedule:
        fitting.append(min(count, most_merged(how, tokens, protected)))
        tokens -= fitting[-1]
    return tuple(fitting)


def grow_schedule(last: int, depth: int) -> tuple[int, ...]:
    """A schedule that grows evenly from 0 in the first block to `last` in the last one."""
    return tuple(round(last * block / max(1, depth - 1)) for block in range(depth))


def schedule_from_text(text: str, depth: int) -> tuple[int, ...]:
    """`12` for each block, `grow:36` for 0 to 36, or as many numbers as blocks. Raises BadInput for anything else."""
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
