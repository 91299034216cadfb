"""Whether an older record may judge a newer one, and what of a change between them is the machine's own."""

import math
from typing import Any

from perf.record.runs import differing_keys
from perf.stats.stats import Interval

from .evidence import Evidence, own_metric
from .rule import TIMED, Rule

MACHINE_METRICS = ("p50", "p90", "p95", "p99", "throughput")
SHOWN = 16  # of a digest


def differing(rule: Rule, now: Evidence, baseline: Evidence) -> tuple[str, ...]:
    """The keys that forbid comparing a figure with the baseline's: a timed one needs an equal machine, an error equal
    inputs, a measure of the user's own an equal command too; a size needs nothing.
    """
    keys: dict[str, tuple[Any, Any]] = {}
    if not rule.wants_baseline:
        return ()
    if not rule.is_of_bench:
        assert now.parity is not None, rule
        assert baseline.parity is not None, rule
        pairs = {"inputs": (baseline.parity.images.digest, now.parity.images.digest)}
        if rule.is_own:
            old, new = (own_metric(each.parity, rule, rule.subject, "a record") for each in (baseline, now))
            pairs["command"] = (old.sha256, new.sha256)
        keys = {key: (then[:SHOWN], new[:SHOWN]) for key, (then, new) in pairs.items() if then != new}
    elif rule.metric in TIMED:
        assert now.bench is not None, rule
        assert baseline.bench is not None, rule
        keys = differing_keys(baseline.bench, now.bench)
    return tuple(f"{key}: {old!r} then, {new!r} now" for key, (old, new) in keys.items())


def divided_by_machine_change(figure: Interval, machine_change: Interval) -> Interval:
    """The figure with the machine's own change divided out, as uncertain as both together."""
    value = figure.value / machine_change.value
    below, above = (
        math.hypot(end / figure.value - 1, machine_change.half_width_rel) for end in (figure.low, figure.high)
    )
    return Interval(value=value, low=value * (1 - below), high=value * (1 + above))


def machine_change(rule: Rule, now: Evidence, baseline: Evidence) -> Interval | None:
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
