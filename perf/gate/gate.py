"""Judge records by rules: PASS, FAIL, INCONCLUSIVE or NOT-COMPARABLE, each with its reason; UNJUDGED without a bound.

A rule fails only when the whole interval of its figure is on the forbidden side, and passes only when none of it is. An
older record judges a newer one only if both were measured alike; and when both hold the same reference model, a change
that this model shows as well is the machine's and decides nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ground.errors import EXIT_FAILED, EXIT_INCONCLUSIVE, EXIT_NOT_COMPARABLE, BadInput
from perf.record.runs import differing_keys
from perf.stats.stats import UNBOUNDED, Interval

from .evidence import Evidence, Reading, exact, own_metric
from .rule import BASELINE, TIMED, Rule

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT-COMPARABLE", "UNJUDGED"]
EXIT_CODES: dict[Verdict, int] = {
    "PASS": 0,
    "UNJUDGED": 0,
    "FAIL": EXIT_FAILED,
    "INCONCLUSIVE": EXIT_INCONCLUSIVE,
    "NOT-COMPARABLE": EXIT_NOT_COMPARABLE,
}
GRAVITY: tuple[Verdict, ...] = ("FAIL", "NOT-COMPARABLE", "INCONCLUSIVE", "PASS", "UNJUDGED")
BLOCKS_IN_ROUND = 4
PARITY = "parity"  # the metric of the row that is a proof's own verdict
MACHINE_METRICS = ("p50", "p90", "p95", "p99", "throughput")
SHOWN = 16  # of a digest


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRule:
    """One rule with its verdict; value, interval and bound are None when there was nothing to compare."""

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
    """All rules, judged; the gravest verdict is the gate's. Raises BadInput without any."""

    rules: tuple[JudgedRule, ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise BadInput("a gate needs at least one rule")

    @property
    def verdict(self) -> Verdict:
        verdicts = {judged.verdict for judged in self.rules}
        return next(verdict for verdict in GRAVITY if verdict in verdicts)

    @property
    def exit_code(self) -> int:
        """0 also where rules wait for the baseline that this record becomes, but not for a proof without limits."""
        if self.verdict == "UNJUDGED" and all(judged.metric == PARITY for judged in self.rules):
            return EXIT_CODES["INCONCLUSIVE"]
        return EXIT_CODES[self.verdict]


def judge(rules: Sequence[Rule], now: Evidence, baseline: Evidence | None = None, *, starting: bool = False) -> Gate:
    """Judge every rule. With `starting` this record may become the baseline: rules that ask for one are UNJUDGED, but
    for those whose figure this record doesn't have either.

    Raises:
        BadInput: no rules, a rule asks for something the records lack, or for a baseline when there is none.
    """
    older = baseline or Evidence()
    lost = [rule for rule in rules if rule.wants_baseline and not older.tells(rule)]
    if lost and not starting:
        now.reading(lost[0], lost[0].subject, "this record")  # what it lacks itself is told first
        kind = "bench" if lost[0].is_of_bench else "parity"
        raise BadInput(
            f"no baseline to compare with, but {lost[0].text!r} needs one: give an older {kind} record as baseline, or "
            "make this one it"
        )
    return Gate(rules=tuple(_started(rule, now) if rule in lost else _judged(rule, now, older) for rule in rules))


def _started(rule: Rule, now: Evidence) -> JudgedRule:
    """A figure that no older record has a bound for; without it the record is no baseline."""
    value, bound = now.reading(rule, rule.subject, "this record"), Reading(interval=None)
    if value.broken is not None:
        return _worded(rule, "FAIL", value.broken, value, bound)
    if value.interval is None or value.doubt is not None:
        return _worded(rule, "INCONCLUSIVE", value.doubt, value, bound)
    if not value.interval.is_bounded:
        return _worded(rule, "INCONCLUSIVE", _too_few(value), value, bound)
    return _worded(rule, "UNJUDGED", "there is no baseline yet; a record that passes becomes it", value, bound)


def _judged(rule: Rule, now: Evidence, baseline: Evidence) -> JudgedRule:
    value = now.reading(rule, rule.subject, "this record")
    bound = _bound(rule, now, baseline)
    differ = _differing(rule, now, baseline)
    if differ:
        return _worded(rule, "NOT-COMPARABLE", "measured differently", value, bound, keys=differ)
    if value.broken is not None or bound.broken is not None:
        return _worded(rule, "FAIL" if value.broken else "INCONCLUSIVE", value.broken or bound.broken, value, bound)
    doubt = value.doubt or bound.doubt
    if value.interval is None or bound.interval is None or doubt is not None:
        return _worded(rule, "INCONCLUSIVE", doubt, value, bound)
    mine, limit = _paired(rule, now, value.interval, bound.interval), bound.interval
    value = replace(value, interval=mine)
    verdict = _compared(rule, mine, limit)
    if verdict == "INCONCLUSIVE":
        return _worded(rule, verdict, _more(mine, limit, value), value, bound)
    moved = _machine_change(rule, now, baseline)
    if moved is not None and _compared(rule, _without(mine, moved), limit) != verdict:
        change = f"{100 * (moved.value - 1):+.1f} %"
        message = f"the machine itself moved: the reference model's own figure changed by {change}"
        return _worded(rule, "INCONCLUSIVE", message, value, bound)
    return _worded(rule, verdict, None, value, bound)


def _bound(rule: Rule, now: Evidence, baseline: Evidence) -> Reading:
    if rule.name is None:
        return Reading(interval=exact(rule.offset))
    if rule.name == BASELINE:
        reading = baseline.reading(rule, rule.subject, "the baseline")
    else:
        reading = now.reading(rule, rule.name, "this record")
    if reading.interval is None:
        return reading
    low, high = sorted(rule.scale * end + rule.offset for end in (reading.interval.low, reading.interval.high))
    return replace(
        reading, interval=Interval(value=rule.scale * reading.interval.value + rule.offset, low=low, high=high)
    )


def _differing(rule: Rule, now: Evidence, baseline: Evidence) -> tuple[str, ...]:
    """The keys that forbid comparing a figure with the baseline's: a timed one needs an equal machine, an error equal
    inputs, a measure of the user's own an equal command too; a size needs nothing.
    """
    if not rule.wants_baseline:
        return ()
    keys: Mapping[str, tuple[Any, Any]] = {}
    if not rule.is_of_bench:
        keys = _other_proof(rule, now, baseline)
    elif rule.metric in TIMED:
        assert now.bench is not None, rule
        assert baseline.bench is not None, rule
        keys = differing_keys(baseline.bench, now.bench)
    return tuple(f"{key}: {old!r} then, {new!r} now" for key, (old, new) in keys.items())


def _other_proof(rule: Rule, now: Evidence, baseline: Evidence) -> Mapping[str, tuple[Any, Any]]:
    """What differs between two parity records of what the rule's figure was measured on and by."""
    assert now.parity is not None, rule
    assert baseline.parity is not None, rule
    pairs = {"inputs": (baseline.parity.images.digest, now.parity.images.digest)}
    if rule.is_own:
        old, new = (own_metric(each.parity, rule, rule.subject, "a record") for each in (baseline, now))
        pairs["command"] = (old.sha256, new.sha256)
    return {key: (one[:SHOWN], other[:SHOWN]) for key, (one, other) in pairs.items() if one != other}


def _paired(rule: Rule, now: Evidence, mine: Interval, limit: Interval) -> Interval:
    """Two subjects of one record ran side by side, so that their ratio is known better than either latency."""
    bench = now.bench
    if rule.is_own or rule.metric != "p50" or rule.name in (None, BASELINE) or bench is None:
        return mine
    pair = (rule.subject or bench.candidate.name, rule.name)
    if pair != (bench.candidate.name, bench.reference.name):
        return mine
    speedup = now.reading(replace(rule, metric="speedup"), None, "this record").interval
    if speedup is None or speedup.low == 0:
        return mine
    low, high = (mine.value * speedup.value / end for end in (speedup.high, speedup.low))
    return Interval(value=mine.value, low=low, high=high)


def _compared(rule: Rule, mine: Interval, limit: Interval) -> Verdict:
    """Where the interval of (mine - limit) lies; independent uncertainties add in quadrature."""
    low, high = _gap(mine, limit)
    broken = {rule.breaks(low, 0.0), rule.breaks(high, 0.0)}
    if len(broken) == 2:
        return "INCONCLUSIVE"
    return "FAIL" if True in broken else "PASS"


def _gap(mine: Interval, limit: Interval) -> tuple[float, float]:
    gap = mine.value - limit.value
    below = math.hypot(mine.value - mine.low, limit.high - limit.value)
    above = math.hypot(mine.high - mine.value, limit.value - limit.low)
    return gap - below, gap + above


def _more(mine: Interval, limit: Interval, value: Reading) -> str:
    """About how much more data would take the interval off the bound: widths shrink with the square root of it."""
    low, high = _gap(mine, limit)
    gap = mine.value - limit.value
    width = gap - low if gap > 0 else high - gap
    if not mine.is_bounded:
        return _too_few(value)
    if value.unit is None:
        return "the interval straddles the bound"
    more = math.inf if gap == 0 else value.count * ((width / gap) ** 2 - 1)
    if more > 100 * value.count:
        return f"the figure lies on the bound; {value.count} {value.unit} were measured and many more would not decide"
    count, unit = math.ceil(max(more, 1)), value.unit
    if unit == "rounds":
        count, unit = BLOCKS_IN_ROUND * count, "blocks"
    return f"the interval straddles the bound; about {count} more {unit} would decide"


def _too_few(value: Reading) -> str:
    return f"only {value.count} {value.unit} were kept, too few for an interval; measure longer"


def _without(mine: Interval, moved: Interval) -> Interval:
    """The figure with the machine's own change divided out, as uncertain as both together."""
    value = mine.value / moved.value
    below, above = (math.hypot(end / mine.value - 1, moved.half_width_rel) for end in (mine.low, mine.high))
    return Interval(value=value, low=value * (1 - below), high=value * (1 + above))


def _machine_change(rule: Rule, now: Evidence, baseline: Evidence) -> Interval | None:
    """The reference model's figure now over then, when it is the same model and not the one the rule is about."""
    if not rule.wants_baseline or rule.is_own or rule.metric not in MACHINE_METRICS:
        return None
    if now.bench is None or baseline.bench is None:
        return None
    reference, before = now.bench.reference, baseline.bench.reference
    if reference.sha256 is None or reference.sha256 != before.sha256 or rule.subject == reference.name:
        return None
    new = now.reading(rule, reference.name, "this record").interval
    old = baseline.reading(rule, before.name, "the baseline").interval
    if new is None or old is None:
        return None
    value = new.value / old.value
    width = value * math.hypot(new.half_width_rel, old.half_width_rel)
    return Interval(value=value, low=value - width, high=value + width)


def _worded(
    rule: Rule, verdict: Verdict, message: str | None, value: Reading, bound: Reading, keys: tuple[str, ...] = ()
) -> JudgedRule:
    mine, limit = value.interval, bound.interval
    figure = "no figure" if mine is None else f"{_number(mine.value)}{_ends(mine)}"
    against = "" if limit is None else f", bound {_number(limit.value)}"
    reason = "; ".join(part for part in (message, *keys) if part)
    shown, low, high = (None, None, None) if mine is None else mine.figures
    return JudgedRule(
        rule=rule.text,
        verdict=verdict,
        message=f"{figure}{against}" + (f": {reason}" if reason else ""),
        metric=rule.metric,
        value=shown,
        low=low,
        high=high,
        bound=None if limit is None else limit.value,
        keys=keys,
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) >= 1000 else f"{value:.4g}"


def _ends(interval: Interval) -> str:
    if not interval.is_bounded:
        return f" ({UNBOUNDED})"
    return "" if interval.low == interval.high else f" ({_number(interval.low)} to {_number(interval.high)})"
