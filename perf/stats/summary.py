"""Statistics of a bench record for tables, plots and gates."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from perf.record.runs import Bench, Row, Status, TimedBlock, name_of_rerun

from .energy import EnergySummary, summarise_energy
from .launches import LaunchSpread, spread_of_launches
from .quiet import (
    comparison_measure,
    counted_spans,
    is_disturbed,
    launches_of_spans,
    samples,
    throttle_reasons,
    throttled_line,
)
from .stats import (
    DEFAULT_CONFIDENCE,
    Floats,
    Interval,
    Percentile,
    Rounds,
    coefficient_of_variation,
    median_interval,
    rate_interval,
    ratio_of_medians,
    tail,
)

BUSY = "other programs had the CPU during almost all calls; measure again when the machine is quiet"
ONE, VARIED = "one batch", "varied batches"
MOST_GAIN = 1.1  # the limit of MLPerf Inference's compliance test 04, as inputs stay in the processor's caches too


def gain_on_repeats(row: Row, subject: str) -> Interval | None:
    """Return the speed on one repeated batch over that on varied batches, None if that was not measured."""
    return speedup(row.repeat_blocks.get(subject, ()), VARIED, ONE)


def cached_subjects(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the subjects that are faster on repeated inputs than MOST_GAIN allows, each with a sentence."""
    for subject in row.repeat_blocks:
        gain = gain_on_repeats(row, subject)
        if gain is not None and gain.low > MOST_GAIN:
            yield (
                subject,
                f"{gain.value:.2f} times as fast on one repeated batch as on varied ones ({gain.low:.2f} to "
                f"{gain.high:.2f}; at most {MOST_GAIN:g} is allowed): it may answer out of a cache, so its times don't "
                "count",
            )


WORTH_REL = 0.10  # the gain in throughput that justifies a doubled batch, whose latency about doubles


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectSummary:
    """One subject at one batch size; several streams give no latencies, an L2 flush no throughput (images/s)."""

    name: str
    status: Status
    message: str | None
    samples: int
    p50_ms: Interval | None
    p90_ms: Percentile | None
    p95_ms: Percentile | None
    p99_ms: Percentile | None
    cv: float | None
    throughput: Interval | None
    peak_memory_bytes: int | None
    times_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """Statistics of a record at one batch size.

    `speedup`, and `noise` of the A/A run (ideally 1), are reference over candidate, over `rounds` spans. `disturbed`
    means that other programs had the CPU in almost all calls, and `throttled` has what slowed the machine down in
    almost all rounds. `repeats` is the speed on one batch over that on varied ones. `realised_share` is the share of
    time saved over the share of MACs saved: (1 - 1/speedup) / (1 - MACs ratio). `energy` is None without a sensor, and
    beside end-to-end times. `launches` is None for one launch.
    """

    batch: int
    measure: str
    sides: Mapping[str, SubjectSummary]
    speedup: Interval | None
    noise: Interval | None
    realised_share: float | None
    rounds: int
    disturbed: bool
    repeats: Mapping[str, Interval] = field(default_factory=dict)
    throttled: tuple[str, ...] = ()
    energy: EnergySummary | None = None
    launches: LaunchSpread | None = None

    def joules(self, name: str) -> Interval | None:
        """Return a subject's joules per image, None if they were not measured."""
        return None if self.energy is None else self.energy.joules.get(name)

    @property
    def mark(self) -> str:
        """A word for a row whose times are unreliable, or an empty text."""
        return "throttled" if self.throttled else "disturbed" if self.disturbed else ""

    @property
    def doubt(self) -> str | None:
        """The reason why the row's times can't decide anything, with the remedy."""
        return throttled_line(self.throttled) if self.throttled else BUSY if self.disturbed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """The suggested batch size with its reason."""

    batch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Statistics of a record; `end_to_end_rows` is empty if compute is end to end, `knee` is the candidate's."""

    reference: str
    candidate: str
    rows: tuple[SummaryRow, ...]
    end_to_end_rows: tuple[SummaryRow, ...]
    knee: Knee | None
    warnings: tuple[str, ...]

    @property
    def preferred_batch_size(self) -> int | None:
        return None if self.knee is None else self.knee.batch

    def row(self, batch: int, measure: str = "compute") -> SummaryRow | None:
        rows = self.end_to_end_rows if measure == "end_to_end" and self.end_to_end_rows else self.rows
        return next((row for row in rows if row.batch == batch), None)


def summarise(bench: Bench, confidence: float = DEFAULT_CONFIDENCE) -> Summary:
    """Compute the statistics of a record; `confidence` is that of all intervals except `repeats`."""
    rows = tuple(_summarise_row(bench, row, "compute", confidence) for row in bench.rows)
    apart = bench.rows if any(block.end_to_end_ms for row in bench.rows for block in row.blocks) else ()
    rates = {row.batch: row.sides[bench.candidate.name].throughput for row in rows}
    return Summary(
        reference=bench.reference.name,
        candidate=bench.candidate.name,
        rows=rows,
        end_to_end_rows=tuple(_summarise_row(bench, row, "end_to_end", confidence) for row in apart),
        knee=find_knee({batch: rate.value for batch, rate in rates.items() if rate is not None}),
        warnings=bench.warnings,
    )


def find_knee(throughput: Mapping[int, float]) -> Knee | None:
    """Return the least batch whose throughput no larger one beats by over WORTH_REL per doubling; None for one size."""
    if len(throughput) < 2:
        return None
    for batch, rate in sorted(throughput.items()):
        above = {larger: other for larger, other in throughput.items() if larger > batch}
        if all(other <= rate * (1 + WORTH_REL) ** math.log2(larger / batch) for larger, other in above.items()):
            break
    if not above:
        return Knee(batch=batch, reason=f"throughput still rises at the largest batch measured, {rate:.0f} images/s")
    reason = f"{rate:.0f} images/s; no larger batch gains {100 * WORTH_REL:g} % per doubling (the best has "
    return Knee(batch=batch, reason=f"{reason}{max(above.values()):.0f})")


def speedup(
    blocks: Sequence[TimedBlock],
    reference: str,
    candidate: str,
    measure: str = "compute",
    confidence: float = DEFAULT_CONFIDENCE,
) -> Interval | None:
    """Return the reference's time divided by the candidate's, None unless both were measured."""
    slow, fast, launches = _compared_times(blocks, reference, candidate, measure)
    return ratio_of_medians(slow, fast, launches=launches, confidence=confidence) if slow else None


def _compared_times(
    blocks: Sequence[TimedBlock], reference: str, candidate: str, measure: str
) -> tuple[Rounds, Rounds, list[int]]:
    """Return the times of both subjects and the launch, span by span; nothing unless both were measured."""
    measure = measure if comparison_measure(blocks) == "compute" else "wall"
    slow, fast = samples(blocks, reference, measure), samples(blocks, candidate, measure)
    return (slow, fast, launches_of_spans(blocks)) if len(slow) == len(fast) else ([], [], [])


def _summarise_row(bench: Bench, row: Row, measure: str, confidence: float) -> SummaryRow:
    names = reference, candidate = bench.reference.name, bench.candidate.name
    faster = speedup(row.blocks, reference, candidate, measure, confidence)
    again = name_of_rerun(reference)
    return SummaryRow(
        batch=row.batch,
        measure=measure,
        sides={name: _summarise_side(bench, row, name, measure, confidence) for name in (reference, candidate)},
        speedup=faster,
        noise=speedup(row.noise_blocks, reference, again, measure, confidence) if row.noise_blocks else None,
        realised_share=realised_share(faster, bench.reference.macs, bench.candidate.macs),
        rounds=len(counted_spans(row.blocks)),
        disturbed=is_disturbed(row.blocks),
        repeats={name: gain for name in row.repeat_blocks if (gain := gain_on_repeats(row, name)) is not None},
        throttled=throttle_reasons(row.blocks),
        energy=None if row.energy is None or measure != "compute" else summarise_energy(row.energy, names, confidence),
        launches=spread_of_launches(*_compared_times(row.blocks, reference, candidate, measure)),
    )


def realised_share(faster: Interval | None, macs_before: int | None, macs_after: int | None) -> float | None:
    """Return the share of saved time over the share of saved MACs; None if no MACs were saved."""
    if faster is None or not macs_before or macs_after is None or macs_after >= macs_before:
        return None
    return (1 - 1 / faster.value) / (1 - macs_after / macs_before)


def _summarise_side(bench: Bench, row: Row, name: str, measure: str, confidence: float) -> SubjectSummary:
    trial, size = row.trials[name], next(subject.size_bytes for subject in bench.subjects if subject.name == name)
    peak = trial.peak_memory_bytes
    times = samples(row.blocks, name, measure) if comparison_measure(row.blocks) == "compute" else []
    launches = launches_of_spans(row.blocks)
    some, flat = bool(times), np.concatenate([np.empty(0), *times])
    return SubjectSummary(
        name=name,
        status=trial.status,
        message=trial.message,
        samples=len(flat),
        p50_ms=median_interval(times, launches=launches, confidence=confidence) if some else None,
        p90_ms=tail(flat, 90, always=True) if some else None,
        p95_ms=tail(flat, 95) if some else None,
        p99_ms=tail(flat, 99) if some else None,
        cv=coefficient_of_variation(flat) if some else None,
        throughput=None if bench.settings.get("flush_l2") else throughput(row, name, confidence),
        # A peak below the artefact's size is wrong: the runner reused memory that had been freed before.
        peak_memory_bytes=None if peak is None or (size is not None and peak < size) else peak,
        times_ms=tuple(float(ms) for ms in flat),
    )


def throughput(row: Row, name: str, confidence: float = DEFAULT_CONFIDENCE) -> Interval | None:
    """Return images/s from the times of calls if they run one by one on the CPU, else from wall time."""
    one_by_one = all(block.lost_ms is not None for block in row.blocks)
    per_call = samples(row.blocks, name, "compute" if one_by_one else "wall")
    if not per_call:
        return None
    images: Floats = np.asarray([row.batch * len(times) for times in per_call], dtype=np.float64)
    seconds: Floats = np.asarray([times.sum() / 1e3 for times in per_call])
    return rate_interval(images, seconds, launches=launches_of_spans(row.blocks), confidence=confidence)
