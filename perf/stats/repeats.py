"""How much quicker a model answers one batch again and again than varied ones."""

from collections.abc import Iterator

from perf.record.runs import Row

from .quiet import comparison_measure, samples
from .stats import Interval, ratio_of_medians

ONE, VARIED = "one batch", "varied batches"
MOST_GAIN = 1.1  # what MLPerf Inference's compliance test 04 lets pass: inputs stay in the processor's caches, too


def gain_on_repeats(row: Row, subject: str) -> Interval | None:
    """Times as quick on one batch as on varied ones, None where it was not asked."""
    blocks = row.repeat_blocks.get(subject, ())
    slow, fast = (samples(blocks, name, comparison_measure(blocks)) if blocks else [] for name in (VARIED, ONE))
    return ratio_of_medians(slow, fast) if len(slow) and len(slow) == len(fast) else None


def cached_subjects(row: Row) -> Iterator[tuple[str, str]]:
    """The subjects that win by knowing their input, each with a sentence: the whole interval is above what passes."""
    for subject in row.repeat_blocks:
        gain = gain_on_repeats(row, subject)
        if gain is not None and gain.low > MOST_GAIN:
            yield (
                subject,
                f"{gain.value:.2f} times as quick on one batch again and again as on varied ones ({gain.low:.2f} to "
                f"{gain.high:.2f}; up to {MOST_GAIN:g} passes): it may answer out of a cache, its times are no model's",
            )
