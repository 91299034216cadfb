"""Choice of the recorded times for statistics: uninterrupted calls of rounds without throttling."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from perf.record.runs import TimedBlock
from perf.record.states import Block

from .stats import MIN_ROUNDS, Floats

# A call counts as interrupted if its threads waited for a CPU for more than this share of its time.
LOST_REL = 0.02
CLEAN_CALLS = 2  # that each subject needs in a span
QUOTA_REMEDY = "grant more or whole CPUs, or fewer --threads"
HEAT_REMEDY = "cool it, or lower its clocks or power limit"


class QuietSpans:
    """Spans of a comparison: consecutive rounds, joined until each subject has CLEAN_CALLS uninterrupted calls.

    Rounds left over at the end, and at the end of a launch, form no span.
    """

    def __init__(self, subjects: Iterable[str]) -> None:
        self.spans: list[tuple[int, ...]] = []
        self._subjects = frozenset(subjects)
        self._span: list[int] = []
        self._kept_cpu: Counter[str] = Counter()
        self._launch = 0

    def add(self, index: int, blocks: Sequence[TimedBlock]) -> None:
        if blocks[0].launch != self._launch:
            self._launch = blocks[0].launch
            self._span.clear()
            self._kept_cpu.clear()
        self._span.append(index)
        for block in blocks:
            self._kept_cpu[block.subject] += sum(_kept_cpu(block))
        if all(self._kept_cpu[subject] >= CLEAN_CALLS for subject in self._subjects):
            self.spans.append(tuple(self._span))
            self._span.clear()
            self._kept_cpu.clear()


def quiet_spans(blocks: Iterable[TimedBlock]) -> list[tuple[int, ...]]:
    rounds: dict[int, list[TimedBlock]] = {}
    for block in blocks:
        rounds.setdefault(block.round, []).append(block)
    quiet = QuietSpans(block.subject for own in rounds.values() for block in own)
    for index in whole_rounds(chain(*rounds.values())):
        quiet.add(index, rounds[index])
    return quiet.spans


def interrupted_share(blocks: Iterable[TimedBlock]) -> float:
    calls = [call for block in blocks for call in _kept_cpu(block)]
    return calls.count(False) / len(calls) if calls else 0.0


def whole_rounds(blocks: Iterable[Block]) -> list[int]:
    """Return the rounds without a dropped block, and without a throttled one unless almost all are throttled."""
    blocks = tuple(blocks)
    whole = sorted({block.round for block in blocks} - {block.round for block in blocks if block.dropped is not None})
    throttled = {block.round for block in blocks if block.throttled}
    unthrottled = [index for index in whole if index not in throttled]
    return unthrottled if len(unthrottled) >= min(MIN_ROUNDS, len(whole)) else whole


def throttle_reasons(blocks: Iterable[Block]) -> tuple[str, ...]:
    """Return what slowed the machine down in the rounds that count; empty if enough rounds are without throttling."""
    blocks = tuple(blocks)
    whole = set(whole_rounds(blocks))
    return tuple(dict.fromkeys(reason for block in blocks if block.round in whole for reason in block.throttled))


def throttled_line(reasons: Sequence[str]) -> str:
    """Return a sentence about a row in whose rounds the machine was slowed down, with the remedy."""
    remedies = dict.fromkeys(QUOTA_REMEDY if reason == "cgroup_quota" else HEAT_REMEDY for reason in reasons)
    return f"the machine was throttled during almost all rounds ({', '.join(reasons)}); {'; '.join(remedies)}"


def is_disturbed(blocks: Iterable[TimedBlock]) -> bool:
    """Return whether a launch has too few quiet spans, so that interrupted calls are used too and times are biased."""
    blocks = tuple(blocks)
    launch = {block.round: block.launch for block in blocks}
    whole = Counter(launch[index] for index in whole_rounds(blocks))
    quiet = Counter(launch[span[0]] for span in quiet_spans(blocks))
    return any(quiet[each] < min(MIN_ROUNDS, count) for each, count in whole.items())


def comparison_measure(blocks: Iterable[TimedBlock]) -> str:
    """Return the measure that a speed-up is computed from: "compute", or "wall" if calls overlap."""
    return "compute" if all(block.compute_ms for block in blocks) else "wall"


def counted_spans(blocks: Iterable[TimedBlock]) -> list[tuple[int, ...]]:
    """Return the rounds of each span that statistics use: quiet spans, or single rounds if `is_disturbed`."""
    blocks = tuple(blocks)
    return [(index,) for index in whole_rounds(blocks)] if is_disturbed(blocks) else quiet_spans(blocks)


def launches_of_spans(blocks: Iterable[TimedBlock]) -> list[int]:
    blocks = tuple(blocks)
    launch = {block.round: block.launch for block in blocks}
    return [launch[span[0]] for span in counted_spans(blocks)]


def samples(blocks: Iterable[TimedBlock], subject: str, measure: str = "compute") -> list[Floats]:
    """Return the kept times of a subject in ms, one array per span: uninterrupted calls, or all if `is_disturbed`.

    `measure` is compute or end_to_end, a time for each call, or wall, the mean time of a block's calls.
    """
    blocks = tuple(blocks)
    disturbed, spans = is_disturbed(blocks), counted_spans(blocks)
    own: dict[int, list[float]] = {index: [] for span in spans for index in span}
    for block in blocks:
        if block.subject == subject and block.round in own:
            own[block.round] += _block_times(block, measure, disturbed)
    times = [[ms for index in span for ms in own[index]] for span in spans]
    return [np.asarray(span, dtype=np.float64) for span in times if span]


def _block_times(block: TimedBlock, measure: str, disturbed: bool) -> list[float]:
    assert measure in ("compute", "end_to_end", "wall"), measure
    if measure == "wall":
        return [block.wall_ms / block.calls]
    own = block.end_to_end_ms if measure == "end_to_end" and block.end_to_end_ms is not None else block.compute_ms
    return [ms for ms, clean in zip(own, _kept_cpu(block), strict=True) if clean or disturbed]


def _kept_cpu(block: TimedBlock) -> list[bool]:
    """Return for each call whether it kept the CPU; True if unknown, or if calls have no times of their own."""
    if block.lost_ms is None:
        return [True] * (len(block.compute_ms) or block.calls)
    return [lost <= LOST_REL * ms for lost, ms in zip(block.lost_ms, block.compute_ms, strict=True)]
