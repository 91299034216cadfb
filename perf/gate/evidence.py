"""Figures that gate rules ask for, read from records with intervals and doubts, and the machine's own changes."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from ground.errors import BadInput
from perf.parity.measures import FIGURES
from perf.parity.parity import Parity
from perf.record.runs import ENERGY, FARED, OUT_OF_TIME, Bench, SubjectRecord, differing_keys
from perf.stats.compare import ratio_of_independent
from perf.stats.decision import paired_interval
from perf.stats.energy import summarise_energy
from perf.stats.quiet import launches_of_spans, samples, throttled_line
from perf.stats.stats import (
    DEFAULT_CONFIDENCE,
    Interval,
    exact_interval,
    needed_samples,
    percentile_interval,
    z_of,
)
from perf.stats.summary import SummaryRow, cached_subjects, summarise

from .parity_figures import DENSE, Reading, find_link, find_own_metric, own_reading, parity_reading, require_measure
from .rule import ACCURACY, FITTED, JOULES, TIMED, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The records that a gate judges, and the confidence of all intervals, 0 if the point alone decides."""

    bench: Bench | None = None
    parity: Parity | None = None
    confidence: float = DEFAULT_CONFIDENCE
    where: str = "this record"
    """The name of the records in messages."""

    def reading(self, rule: Rule, subject: str | None) -> Reading:
        """Return the rule's figure for a subject, None for the candidate. Raises BadInput if the records lack it."""
        if rule.is_of_bench:
            if self.bench is None:
                raise BadInput(f"rule {rule.text!r}: {rule.metric} needs a bench record, {self.where} has none")
            _require_subject(rule, subject, [each.name for each in self.bench.subjects], self.where)
            if rule.metric in TIMED:
                return _read_time(self.bench, rule, subject, self.where, self.confidence)
            return _read_count(self.bench, rule, subject, self.where)
        _require_subject(rule, subject, (), self.where)
        if rule.is_own:
            return own_reading(find_own_metric(self.parity, rule, subject, self.where), self.confidence)
        return parity_reading(self.parity, rule, subject, self.where, self.confidence)

    def covers(self, rule: Rule) -> bool:
        return (self.bench if rule.is_of_bench else self.parity) is not None


def require_figure(rule: Rule, subjects: Collection[str], where: str) -> None:
    """Raise BadInput for a figure that no record of these subjects has."""
    _require_subject(rule, rule.subject, subjects, where)
    if not rule.wants_baseline:
        _require_subject(rule, rule.name, subjects, where)
    if not rule.is_own and not rule.is_of_bench:
        require_measure(rule, FIGURES | {FITTED, ACCURACY})


def _require_subject(rule: Rule, subject: str | None, subjects: Collection[str], where: str) -> None:
    if subject is None:
        return
    if (rule.is_own or rule.metric == ACCURACY) and subject != DENSE:
        raise BadInput(
            f"rule {rule.text!r}: {rule.metric} exists for {DENSE!r} and for candidates, not for {subject!r}"
        )
    if rule.is_of_bench and subject not in subjects:
        raise BadInput(f"rule {rule.text!r}: {where} has no subject {subject!r}, it has {' and '.join(subjects)}")
    if not rule.is_own and not rule.is_of_bench and rule.metric != ACCURACY:
        raise BadInput(f"rule {rule.text!r}: parity is between two models; {subject!r} alone has none")


def _subject(bench: Bench, name: str | None) -> SubjectRecord:
    return bench.candidate if name is None else next(each for each in bench.subjects if each.name == name)


def _read_count(bench: Bench, rule: Rule, name: str | None, where: str) -> Reading:
    subject = _subject(bench, name)
    at_batch = {} if rule.batch is None else {"device_memory": subject.device_memory_at(rule.batch)}
    value: int | None = (asdict(subject) | at_batch)[rule.metric]
    if value is None:
        at = "" if rule.batch is None else f" at batch {rule.batch}"
        raise BadInput(f"rule {rule.text!r}: {where} has no {rule.metric} of {subject.name}{at}")
    return Reading(interval=exact_interval(value))


def _read_time(bench: Bench, rule: Rule, name: str | None, where: str, confidence: float) -> Reading:
    subject = _subject(bench, name).name
    # Only the row of the rule's batch is summarised, because all rows for every rule would take long.
    summary = summarise(replace(bench, rows=tuple(row for row in bench.rows if row.batch == rule.batch)), confidence)
    row = None if rule.batch is None else summary.row(rule.batch, rule.measure)
    if row is None:
        batches = ", ".join(str(row.batch) for row in bench.rows)
        raise BadInput(f"rule {rule.text!r}: {where} was not measured at batch {rule.batch}, only at {batches}")
    side = row.sides[subject]
    if side.status != "ok":
        why = f"{subject} {FARED[side.status]} at batch {row.batch}: {side.message}"
        late = side.status == OUT_OF_TIME
        return Reading(interval=None, doubt=why if late else None, broken=None if late else why)
    reading = _read_timed_interval(bench, rule, row, subject, confidence)
    rounds = row.energy.rounds if rule.metric == JOULES and row.energy else row.rounds
    measured = next(each for each in bench.rows if each.batch == row.batch)
    doubt = next((f"{name} is {why}" for name, why in cached_subjects(measured)), None)
    launches = len(row.launches.speedups) if row.launches else 1
    return replace(reading, count=rounds, unit="rounds", launches=launches, doubt=reading.doubt or row.doubt or doubt)


def _read_timed_interval(bench: Bench, rule: Rule, row: SummaryRow, subject: str, confidence: float) -> Reading:
    side = row.sides[subject]
    match rule.metric:
        case "speedup":
            return _or_doubt(row.speedup, "there is no speed-up: the reference could not be measured at this batch")
        case "throughput":
            return _or_doubt(side.throughput, "throughput is not measured while the L2 cache is flushed")
        case "peak_memory_bytes":
            peak = side.peak_memory_bytes
            return _or_doubt(None if peak is None else exact_interval(peak), "this system does not report peak memory")
        case "joules":
            return _read_joules(bench, row, subject)
    percent = float(rule.metric.removeprefix("p"))
    if side.p50_ms is None:
        return Reading(interval=None, doubt="with several streams only throughput is measured, not latency")
    if percent == 50:
        return Reading(interval=side.p50_ms)
    needed = needed_samples(percent)
    if side.samples < needed:
        return Reading(interval=None, doubt=f"{rule.metric} needs {needed} samples, there are {side.samples}")
    blocks = next(each.blocks for each in bench.rows if each.batch == row.batch)
    times, launches = samples(blocks, subject, rule.measure), launches_of_spans(blocks)
    return Reading(interval=percentile_interval(times, percent, launches=launches, confidence=confidence))


def _read_joules(bench: Bench, row: SummaryRow, subject: str) -> Reading:
    energy = row.energy
    if energy is None:
        why = bench.settings.get(ENERGY) or "the record is older than its measurement"
        late = next(
            (text for each in bench.rows if each.batch == row.batch for text in each.left_out if "energy" in text), why
        )
        return Reading(interval=None, doubt=f"energy was not measured: {late}")
    reading = _or_doubt(energy.joules.get(subject), f"{subject} takes no more power than the idle machine")
    return replace(reading, doubt=throttled_line(energy.throttled) if energy.throttled else reading.doubt)


def paired_ratio(rule: Rule, now: Evidence) -> Interval | None:
    """Return the reference's p50 or joules over the candidate's, as both ran side by side; None for other figures."""
    if now.bench is None or rule.is_own:
        return None
    if rule.metric == "p50":
        return now.reading(replace(rule, metric="speedup"), None).interval
    row = next((each for each in now.bench.rows if each.batch == rule.batch), None)
    if rule.metric != JOULES or row is None or row.energy is None:
        return None
    names = now.bench.reference.name, now.bench.candidate.name
    return summarise_energy(row.energy, names, now.confidence).ratio


def _or_doubt(interval: Interval | None, doubt: str) -> Reading:
    return Reading(interval=interval, doubt=doubt if interval is None else None)


def paired_change(rule: Rule, now: Evidence) -> tuple[Reading, Interval] | None:
    """Return a figure's paired difference from the dense model's, and the dense figure; None without pairs."""
    parity = now.parity
    if parity is None or rule.name != DENSE or rule.subject is not None:
        return None
    if rule.is_own:
        own, dense = (find_own_metric(parity, rule, subject, now.where) for subject in (None, DENSE))
        if own.change_error is None or own.images is None:
            return None
        mean, width = own.value - dense.value, z_of(now.confidence) * own.change_error
        interval = Interval(value=mean, low=mean - width, high=mean + width)
        return Reading(interval=interval, count=own.images, unit="images"), exact_interval(dense.value)
    if rule.metric != ACCURACY:
        return None
    mine, dense_reading = (now.reading(rule, subject) for subject in (None, DENSE))
    label = find_link(parity.links, rule, now.where).candidate
    pair = next(each for each in parity.comparisons if each.b == label)
    low, high = paired_interval(pair.only_b, pair.only_a, mine.count, now.confidence)
    change = Interval(value=mine.known.value - dense_reading.known.value, low=low, high=high)
    return Reading(interval=change, count=mine.count, unit="images"), dense_reading.known


MACHINE_METRICS = ("p50", "p90", "p95", "p99", "throughput", JOULES)
SHOWN = 16  # characters of a digest


def find_incomparable_keys(rule: Rule, now: Evidence, baseline: Evidence) -> tuple[str, ...]:
    """Return a text with both values of each key (machine, inputs, command) that forbids a comparison of records."""
    keys: dict[str, tuple[Any, Any]] = {}
    if not rule.wants_baseline:
        return ()
    if not rule.is_of_bench:
        assert now.parity is not None, rule
        assert baseline.parity is not None, rule
        pairs = {"inputs": (baseline.parity.images.digest, now.parity.images.digest)}
        if rule.is_own:
            old, new = (find_own_metric(each.parity, rule, rule.subject, each.where) for each in (baseline, now))
            pairs["command"] = (old.sha256, new.sha256)
        keys = {key: (then[:SHOWN], new[:SHOWN]) for key, (then, new) in pairs.items() if then != new}
    elif rule.metric in TIMED:
        assert now.bench is not None, rule
        assert baseline.bench is not None, rule
        keys = differing_keys(baseline.bench, now.bench)
        sensors = baseline.bench.settings.get(ENERGY), now.bench.settings.get(ENERGY)
        if rule.metric == JOULES and sensors[0] != sensors[1]:
            keys[ENERGY] = sensors
    return tuple(f"{key}: {old!r} then, {new!r} now" for key, (old, new) in keys.items())


def machine_change(rule: Rule, now: Evidence, baseline: Evidence) -> Interval | None:
    """Return the reference model's figure divided by its figure in the baseline; None if they can't be compared."""
    if not rule.wants_baseline or rule.is_own or rule.metric not in MACHINE_METRICS:
        return None
    if now.bench is None or baseline.bench is None:
        return None
    reference, before = now.bench.reference, baseline.bench.reference
    if reference.sha256 is None or reference.sha256 != before.sha256 or rule.subject == reference.name:
        return None
    new = now.reading(rule, reference.name).interval
    old = baseline.reading(rule, before.name).interval
    return None if new is None or old is None else ratio_of_independent(new, old)
