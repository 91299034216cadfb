"""Warnings about unstable measurements, for display beside the numbers."""

from collections.abc import Iterator, Sequence

import numpy as np

from perf.record.runs import OUT_OF_TIME, Row, TimedBlock

from .energy import energy_warnings, summarise_energy
from .quiet import (
    comparison_measure,
    interrupted_share,
    is_disturbed,
    samples,
    throttle_reasons,
    throttled_line,
    whole_rounds,
)
from .stats import MIN_ROUNDS, coefficient_of_variation, trend, trend_score
from .summary import cached_subjects

CV_LIMIT = {"cuda events": 0.025, "host": 0.10}  # trtexec's limit for device time; a host clock includes all other work
DRIFT_LIMIT_REL = 0.03
DRIFT_SCORE = 2.58  # 99 % two-sided
INTERRUPTED_LIMIT = 0.25
ENQUEUE_LIMIT = 0.8  # trtexec's; above it the device waits for the host


def find_warnings(rows: Sequence[Row]) -> list[str]:
    return [f"batch {row.batch}, {text}" for row in rows for text in _row_warnings(row)]


def drift(blocks: Sequence[TimedBlock], subject: str) -> float | None:
    """Return the largest relative change of a subject's round medians over a launch, None if it is within noise."""
    changes = list[float]()
    for launch in {block.launch: None for block in blocks}:
        own = [block for block in blocks if block.launch == launch]
        medians = [float(np.median(times)) for times in samples(own, subject, comparison_measure(own))]
        if abs(trend_score(medians)) > DRIFT_SCORE and abs(trend(medians)) > DRIFT_LIMIT_REL:
            changes.append(trend(medians))
    return max(changes, key=abs, default=None)


def _row_warnings(row: Row) -> Iterator[str]:
    yield from dict.fromkeys(f"not measured: {t.message}" for t in row.trials.values() if t.status == OUT_OF_TIME)
    for name, trial in row.trials.items():
        if trial.status == OUT_OF_TIME:
            continue
        if trial.status != "ok":
            yield f"{name}: {'out of memory' if trial.status == 'oom' else 'failed'}: {trial.message}"
        elif not trial.warm_up_flat:
            yield f"{name}: the warm-up reached its time limit before the times were flat"
        yield from (f"{name}: {text}" for text in _block_warnings(row.blocks, name))
    yield from (f"{name}: {text}" for name, text in cached_subjects(row))
    yield from (f"{name}: no memory to try it on varied batches" for name, own in row.repeat_blocks.items() if not own)
    yield from row.left_out
    yield from _warnings_of_all(row.blocks)
    if row.energy is not None:
        measured = [name for name in row.trials if any(block.subject == name for block in row.energy.blocks)]
        yield from energy_warnings(summarise_energy(row.energy, [*row.trials], confidence=0.0), measured)


def _warnings_of_all(blocks: Sequence[TimedBlock]) -> Iterator[str]:
    total, complete = len({block.round for block in blocks}), len(whole_rounds(blocks))
    interrupted = interrupted_share(blocks)
    if 0 < complete < MIN_ROUNDS:
        yield f"{complete} rounds are too few for an interval, {MIN_ROUNDS} make one; give a longer --time-limit"
    throttled = throttle_reasons(blocks)
    if complete < total:
        reasons = {block.dropped for block in blocks if block.dropped}
        hot = {} if throttled else dict.fromkeys(reason for block in blocks for reason in block.throttled)
        reasons |= {f"throttled: {', '.join(hot)}"} if hot else set()
        yield f"{total - complete} of {total} rounds left out: {'; '.join(sorted(reasons))}"
    if throttled:
        yield f"throttled: {throttled_line(throttled)}; don't rely on these times"
    if is_disturbed(blocks):
        yield (
            f"disturbed: other programs took the CPU from {100 * interrupted:.0f} % of the calls, or there are more "
            f"threads than CPUs; don't rely on these times"
        )
    elif interrupted > INTERRUPTED_LIMIT:
        yield f"{100 * interrupted:.0f} % of the calls left out: other programs had the CPU"
    states = [block.gpu for block in blocks if block.gpu is not None]
    if any(state.foreign_processes for state in states):
        yield f"{max(state.foreign_processes for state in states)} other processes used the GPU"
    capped = sum("sw_power_cap" in state.throttle for state in states)
    if capped:
        yield f"the power limit lowered the clocks in {capped} of {len(states)} blocks"


def _block_warnings(blocks: Sequence[TimedBlock], name: str) -> Iterator[str]:
    own = [block for block in blocks if block.subject == name]
    measured = samples(own, name, comparison_measure(own))
    if not measured:
        return
    on_device = own[0].enqueue_ms is not None
    cv = coefficient_of_variation(np.concatenate(measured))
    limit = CV_LIMIT["cuda events" if on_device else "host"]
    if cv > limit:
        advice = "lock the clocks" if on_device else "quieten the machine"
        yield f"samples vary by {100 * cv:.1f} % (CV; above {100 * limit:g} % is unstable); {advice}"
    change = drift(own, name)
    if change is not None:
        yield f"times drifted by {100 * change:+.1f} % over the measurement"
    enqueue = sum(block.enqueue_ms or 0.0 for block in own)
    if on_device and enqueue > ENQUEUE_LIMIT * sum(sum(block.compute_ms) for block in own):
        yield "the host takes as long to issue a call as the device to run it; measure with a CUDA graph"
