"""Judgement of records by rules: PASS, FAIL, INCONCLUSIVE, NOT-COMPARABLE or UNJUDGED, each with its reason.

A record is compared with an older one only if both were measured in the same way. A change that the same reference
model shows too is attributed to the machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ground.errors import EXIT_FAILED, EXIT_INCONCLUSIVE, EXIT_NOT_COMPARABLE, BadInput
from ground.quantity import format_number
from perf.stats.compare import ratio_of_independent
from perf.stats.decision import (
    STRADDLES,
    Decision,
    compared_with_limit,
    confidence_text,
    data_factor,
    decide,
    percent,
    percent_change,
    percent_limit,
    samples_for_interval,
    samples_for_share,
    share_interval,
)
from perf.stats.stats import UNBOUNDED, Interval, exact_interval

from .evidence import (
    Evidence,
    find_incomparable_keys,
    machine_change,
    paired_change,
    paired_ratio,
)
from .parity_figures import Reading, rules_by_output
from .rule import ACCURACY, BASELINE, JOULES, TIMED, Rule

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT-COMPARABLE", "UNJUDGED"]
EXIT_CODES: dict[Verdict, int] = {
    "PASS": 0,
    "UNJUDGED": 0,
    "FAIL": EXIT_FAILED,
    "INCONCLUSIVE": EXIT_INCONCLUSIVE,
    "NOT-COMPARABLE": EXIT_NOT_COMPARABLE,
}
GRAVITY: tuple[Verdict, ...] = ("FAIL", "NOT-COMPARABLE", "INCONCLUSIVE", "PASS", "UNJUDGED")
BLOCKS_IN_ROUND = {JOULES: 3}  # 4 of latency
FAIL_DOUBT = 1 / 5  # of the doubt, 1 - confidence, at which a time may fail: equal models fail in fewer than 1 of 100
PARITY = "parity"  # the metric of the row with the proof's own verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRule:
    """One rule with its verdict; value, interval and bound are None if there was nothing to compare."""

    rule: str
    verdict: Verdict
    message: str
    metric: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """All judged rules; the gravest verdict counts.

    `confidence` is 0 if the point alone decided, and None, which means 0.95, in old records.
    """

    rules: tuple[JudgedRule, ...]
    confidence: float | None = None

    def __post_init__(self) -> None:
        if not self.rules:
            raise BadInput("a gate needs at least one rule")

    @property
    def verdict(self) -> Verdict:
        verdicts = {judged.verdict for judged in self.rules}
        return next(verdict for verdict in GRAVITY if verdict in verdicts)

    @property
    def exit_code(self) -> int:
        """The verdict's exit code; for UNJUDGED 0, but that of INCONCLUSIVE if the only row is an unjudged proof."""
        if self.verdict == "UNJUDGED" and all(judged.metric == PARITY for judged in self.rules):
            return EXIT_CODES["INCONCLUSIVE"]
        return EXIT_CODES[self.verdict]


def judge(rules: Sequence[Rule], now: Evidence, baseline: Evidence | None = None, *, starting: bool = False) -> Gate:
    """Judge every rule, at each output that has its figure unless the rule names one.

    With `starting` this record may become the baseline, so rules that need a baseline are UNJUDGED. Raises BadInput for
    no rules, and for a missing figure or baseline.
    """
    older = replace(baseline or Evidence(), confidence=now.confidence, where="the baseline")
    lost = [rule for rule in rules if rule.wants_baseline and not older.covers(rule)]
    if lost and not starting:
        now.reading(lost[0], lost[0].subject)  # a figure that this record lacks is reported first
        kind = "bench" if lost[0].is_of_bench else "parity"
        raise BadInput(
            f"no baseline to compare with, but {lost[0].text!r} needs one: give an older {kind} record as baseline, or "
            "make this one the baseline"
        )
    rows = tuple(
        _judge_rule(each, now, None if rule in lost else older)
        for rule in rules
        for each in rules_by_output(rule, now.parity)
    )
    return Gate(rules=rows, confidence=now.confidence)


def _judge_rule(rule: Rule, now: Evidence, baseline: Evidence | None) -> JudgedRule:
    """Judge a rule, and a time that fails once more with FAIL_DOUBT."""
    judged = _judge_at_confidence(rule, now, baseline)
    if judged.verdict != "FAIL" or rule.metric not in TIMED or now.confidence == 0:
        return judged
    surer = 1 - FAIL_DOUBT * (1 - now.confidence)
    older = baseline and replace(baseline, confidence=surer)
    return _judge_at_confidence(rule, replace(now, confidence=surer), older)


def _judge_at_confidence(rule: Rule, now: Evidence, baseline: Evidence | None) -> JudgedRule:
    value, bound, keys = now.reading(rule, rule.subject), Reading(interval=None), tuple[str, ...]()
    if baseline is not None:
        bound, keys = _read_bound(rule, now, baseline), find_incomparable_keys(rule, now, baseline)
    mine, doubt = value.interval, value.doubt or bound.doubt
    verdict: Verdict = "INCONCLUSIVE"
    message: str | None
    if keys:
        verdict, message = "NOT-COMPARABLE", "measured differently"
    elif value.broken is not None:
        verdict, message = "FAIL", value.broken
    elif bound.broken is not None or mine is None or doubt is not None:
        message = bound.broken or doubt
    elif baseline is not None:
        paired = paired_change(rule, now)
        if paired is None:
            value = replace(value, interval=_narrow_by_pair(rule, now, mine))
            verdict, message = _judge_bound(rule, now, baseline, value, bound)
        else:
            verdict, message = _judge_paired_change(rule, *paired, now.confidence)
        if rule.is_own and value.unit is None:
            message = f"{message}; point only" if message else "point only: this measure has no value for each image"
    elif not mine.is_bounded:
        message = _too_few(value, now.confidence)
    else:
        verdict, message = "UNJUDGED", "there is no baseline yet; a record that passes becomes it"
    reason = "; ".join(part for part in (message, *keys) if part)
    figure = _reading_text(value, bound, now.confidence)
    shown, low, high = (None, None, None) if value.interval is None else value.interval.figures
    return JudgedRule(
        rule=rule.text,
        verdict=verdict,
        message=f"{figure}: {reason}" if reason else figure,
        metric=rule.metric,
        value=shown,
        low=low,
        high=high,
        bound=None if bound.interval is None else bound.interval.value,
        keys=keys,
    )


def _judge_bound(
    rule: Rule, now: Evidence, baseline: Evidence, value: Reading, bound: Reading
) -> tuple[Verdict, str | None]:
    figure, limit = value.known, bound.known
    verdict = _compare(rule, figure, limit)
    if verdict == "INCONCLUSIVE":
        return verdict, _data_needed(rule, value, bound, now.confidence)
    machine = machine_change(rule, now, baseline)
    if machine is not None and _compare(rule, ratio_of_independent(figure, machine), limit) != verdict:
        change = f"{100 * (machine.value - 1):+.1f} %"
        return "INCONCLUSIVE", f"the machine itself moved: the reference model's own figure changed by {change}"
    return verdict, None


def _judge_paired_change(rule: Rule, change: Reading, dense: Interval, confidence: float) -> tuple[Verdict, str]:
    """Judge a figure by its paired difference from the dense model's, mine - (scale * dense + offset)."""
    difference = change.known
    # With a factor other than 1, the dense figure's own uncertainty counts too.
    of_dense = (1 - rule.scale) * dense.value
    spread = [abs(1 - rule.scale) * (end - dense.value) for end in (dense.low, dense.high)]
    gap = difference.value + of_dense - rule.offset
    low = gap - math.hypot(difference.value - difference.low, spread[0])
    high = gap + math.hypot(difference.high - difference.value, spread[1])
    verdict = decide(low, high, lambda end: rule.breaks(end, 0.0))
    number = percent_change if rule.metric == ACCURACY else _number
    sentence = f"differs from dense by {number(difference.value)}"
    if difference.low < difference.high:
        sentence += f" ({number(difference.low)} to {number(difference.high)} {confidence_text(confidence)}, paired)"
    if verdict == "INCONCLUSIVE":
        sentence += f": {samples_for_interval(gap, gap - low if gap > 0 else high - gap, change.count, 'images')}"
    return verdict, sentence


def _read_bound(rule: Rule, now: Evidence, baseline: Evidence) -> Reading:
    if rule.name is None:
        return Reading(interval=exact_interval(rule.offset))
    reading = baseline.reading(rule, rule.subject) if rule.name == BASELINE else now.reading(rule, rule.name)
    return reading if reading.interval is None else replace(reading, interval=_scale(rule, reading.interval))


def _scale(rule: Rule, reference: Interval) -> Interval:
    low, high = sorted(rule.scale * end + rule.offset for end in (reference.low, reference.high))
    return Interval(value=rule.scale * reference.value + rule.offset, low=low, high=high)


def _narrow_by_pair(rule: Rule, now: Evidence, figure: Interval) -> Interval:
    """Return a p50 or joules with the narrower interval of the ratio, as both subjects of a record ran side by side."""
    bench = now.bench
    if rule.name in (None, BASELINE) or bench is None:
        return figure
    pair = (rule.subject or bench.candidate.name, rule.name)
    if pair != (bench.candidate.name, bench.reference.name):
        return figure
    ratio = paired_ratio(rule, now)
    if ratio is None or ratio.low == 0:
        return figure
    low, high = (figure.value * ratio.value / end for end in (ratio.high, ratio.low))
    return Interval(value=figure.value, low=low, high=high)


def _compare(rule: Rule, figure: Interval, limit: Interval) -> Decision:
    return decide(*_gap(figure, limit), lambda end: rule.breaks(end, 0.0))


def _gap(figure: Interval, limit: Interval) -> tuple[float, float]:
    gap = figure.value - limit.value
    below = math.hypot(figure.value - figure.low, limit.high - limit.value)
    above = math.hypot(figure.high - figure.value, limit.value - limit.low)
    return gap - below, gap + above


def _data_needed(rule: Rule, value: Reading, bound: Reading, confidence: float) -> str:
    mine, limit = value.known, bound.known
    if not mine.is_bounded:
        return _too_few(value, confidence)
    if value.unit is None:
        return STRADDLES
    if (share := value.share) is not None:

        def decides(count: int) -> bool:
            older = None if bound.share is None else share_interval(bound.share, count, confidence)
            end = limit if older is None else _scale(rule, older)
            return _compare(rule, share_interval(share, count, confidence), end) != "INCONCLUSIVE"

        return samples_for_share(decides, value.count, value.unit)
    low, high = _gap(mine, limit)
    gap = mine.value - limit.value
    times = data_factor(gap, gap - low if gap > 0 else high - gap)
    if not math.isfinite(times):
        return f"the figure lies on the limit; {value.count} {value.unit} were measured and many more would not decide"
    if value.launches > 1:
        return f"{STRADDLES}; about {math.ceil(max(value.launches * (times - 1), 1))} more launches would decide"
    blocks = BLOCKS_IN_ROUND.get(rule.metric, 4) * math.ceil(max(value.count * (times - 1), 1))
    return f"{STRADDLES}; about {blocks} more blocks would decide"


def _too_few(value: Reading, confidence: float) -> str:
    only = f"only {value.count} {value.unit} were kept, too few for an interval"
    return f"{only} {confidence_text(confidence)}; measure longer"


def _reading_text(value: Reading, bound: Reading, confidence: float) -> str:
    mine, limit = value.interval, bound.interval
    number, of_limit = (_number, _number) if value.share is None else (percent, percent_limit)
    shown = None if limit is None else of_limit(limit.value)
    if mine is None:
        return "no figure" if shown is None else f"no figure, limit {shown}"
    if not mine.is_bounded:
        return f"{number(mine.value)} ({UNBOUNDED})" + ("" if shown is None else f", limit {shown}")
    return compared_with_limit(mine, shown, None if value.unit is None else confidence, number)


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) >= 1000 else format_number(value, 4)
