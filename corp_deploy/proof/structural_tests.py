"""What holds of any answers of a candidate: the same in every slot and order of a batch, finite, within range."""

from collections.abc import Mapping

from ground.feeds import Feeds, Outputs, batch_size, input_noun, rows_of
from perf.parity import structure
from perf.parity.structure import StructuralTest
from perf.parity.tolerance import Choices

from .candidates import Candidate, Run
from .link_rules import Merges

# Slots of a batch, inputs pushed out of range.
SLOTS, EXTREME_INPUTS = 8, 4


def structural_tests(
    candidate: Candidate, run: Run, feeds: Feeds, by_batch: Mapping[int, Outputs], bound: float, merges: Merges | None
) -> list[StructuralTest]:
    """What holds for some inputs holds for all: the link itself judges every input at the largest batch."""
    largest, label = candidate.batch or max(by_batch), candidate.label
    slots, noun = min(largest, SLOTS), input_noun(feeds)
    if merges is not None:
        # Another batch size rounds otherwise, which may have other tokens merged: tests of what settles its tokens.
        firm_N = Choices(margins_N=merges.margins_N).stable_inputs(bound)
        if not len(firm_N):
            why = (
                f"all {noun} have merged tokens that are alike to {bound:.1g}, so batches may merge others; not tested"
            )
            untested = StructuralTest(
                candidate=label, test="batch-slot", status="NOTED", value=0.0, bound=bound, reason=why
            )
            return [*structure.outputs(label, by_batch[max(by_batch)], noun=noun), untested]
        feeds = rows_of(feeds, firm_N)
        by_batch = {size: rows_of(rows, firm_N[firm_N < batch_size(rows)]) for size, rows in by_batch.items()}
        by_batch = {size: rows for size, rows in by_batch.items() if batch_size(rows)}
    straight = by_batch[max(by_batch)]
    some, extreme = slice(max(slots, 2)), rows_of(feeds, slice(min(slots, EXTREME_INPUTS)))
    return [
        structure.batch_slot(label, run, rows_of(feeds, slice(1)), batch=slots, bound=bound),
        structure.permutation(label, run, rows_of(feeds, some), bound=bound, straight=rows_of(straight, some)),
        *structure.outputs(label, straight, noun=noun),
        *(() if candidate.takes_pixels else structure.extremes(label, run, extreme)),
        *structure.batch_sizes(label, by_batch, bound=bound, noun=noun),
    ]
