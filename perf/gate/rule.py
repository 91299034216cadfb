"""The grammar of gate rules. A rule states what must not be true.

    rule    = [subject "."] ["end_to_end." | "metric."] metric ["@" place] compare bound
    metric  = p50 p90 p95 p99 (ms) | throughput (images/s) | speedup | peak_memory_bytes
            | joules (an image, beyond the idle machine's)                each at a batch: @b8
            | device_memory (bytes: weights and activations)              of the profile of a batch: @b8
            | size_bytes | plan_bytes | params | macs | fused_attention | sparse_layers
            | a measure of the parity record: relative_error, top1_agreement, ...          at a link or output: @half,
              @boxes; without a place at each output from the dense model to what ships
            | accuracy on labelled images, of what ships, of a link's candidate or of the dense model
            | fitted_images (how many of the parity record's images the model was fitted to)
            | after "metric.": the name of a user's own measure, at a link or of what ships
    compare = < <= > >=
    bound   = size | name | name * number | name + size | name - size
    size    = number, of a metric in bytes also with its unit: 200 MB, 1.5 GiB
    name    = "baseline" (the same figure in the older record of its kind) | a subject (the same figure of that subject)

A rule without a subject is about the candidate. `dense.p50@b1 > baseline * 1.03` is about the dense model, and
`metric.map < dense - 0.01` compares a user's own measure with the dense model's.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from ground.errors import BadInput
from ground.quantity import BATCH, Quantity, Real, quoted

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
JOULES = "joules"
TIMED = ("p50", "p90", "p95", "p99", "throughput", "speedup", "peak_memory_bytes", JOULES)
COUNTED = ("size_bytes", "plan_bytes", "params", "macs", "fused_attention", "sparse_layers")
# Exact figures that depend on the batch.
PLACED = ("device_memory",)
# Figures that only engines have.
OF_ENGINES = ("plan_bytes", "fused_attention", "sparse_layers", *PLACED)
IN_BYTES = ("size_bytes", "plan_bytes", "device_memory", "peak_memory_bytes")
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
BASELINE = "baseline"
FITTED = "fitted_images"
ACCURACY = "accuracy"
OWN = "metric"  # the prefix of a user's own measures
_NUMBER = r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
LIMIT = Real(low=-1e18, high=1e18)
_RULE = re.compile(
    r"^\s*(?P<prefix>(?:[\w-]+\.)*)(?P<metric>[a-z]\w*)(?:@(?P<place>[\w .-]*\w))?"
    r"\s*(?P<compare><=|>=|<|>)(?P<bound>.+)$"
)
_BOUND = re.compile(
    rf"^\s*(?:(?P<number>{_NUMBER})|(?P<name>[A-Za-z][\w-]*)\s*(?:(?P<sign>[-+*])\s*(?P<by>{_NUMBER}))?)"
    rf"\s*(?P<unit>{'|'.join(UNITS)})?\s*$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A parsed rule; its bound is `scale` times the figure `name` plus `offset`, or `offset` without a name."""

    text: str
    subject: str | None
    measure: str
    metric: str
    batch: int | None
    link: str | None
    compare: str
    name: str | None
    scale: float
    offset: float

    def breaks(self, value: float, bound: float) -> bool:
        return COMPARE[self.compare](value, bound)

    @property
    def is_own(self) -> bool:
        return self.measure == OWN

    @property
    def wants_baseline(self) -> bool:
        return self.name == BASELINE

    @property
    def is_of_bench(self) -> bool:
        """True if the figure is in a bench record, not in a parity record."""
        return not self.is_own and self.metric in (*TIMED, *COUNTED, *PLACED)


def rule_from_text(text: str) -> Rule:
    match = _RULE.match(text)
    bound = None if match is None else _BOUND.match(match["bound"])
    if match is None or bound is None:
        problem = "it has no comparison" if match is None else f"{quoted(match['bound'].strip())} is not a valid bound"
        raise BadInput(
            f"rule {quoted(text)}: {problem}; a rule states what must not be true, such as 'p50@b1 > baseline * 1.03', "
            f"'speedup@b8 < 1.2', 'top1_agreement < 0.99' or 'fused_attention < dense'"
        )
    subject, measure = _parse_prefixes(text, match["prefix"])
    batch, link = (None, match["place"]) if measure == OWN else _parse_place(text, match["metric"], match["place"])
    if measure == "end_to_end" and match["metric"] not in TIMED[:6]:
        raise BadInput(f"rule {quoted(text)}: end_to_end goes with {', '.join(TIMED[:6])}, not with {match['metric']}")
    scale, offset = _parse_bound(text, bound, _parse_unit(text, measure, match["metric"], bound))
    return Rule(
        text=text.strip(),
        subject=subject,
        measure=measure,
        metric=match["metric"],
        batch=batch,
        link=link,
        compare=match["compare"],
        name=bound["name"],
        scale=scale,
        offset=offset,
    )


def _parse_prefixes(text: str, prefix: str) -> tuple[str | None, str]:
    prefixes = [each for each in prefix.split(".") if each]
    measures = [each for each in prefixes if each in ("compute", "end_to_end", OWN)]
    subjects = [each for each in prefixes if each not in measures]
    if len(subjects) > 1 or len(measures) > 1:
        raise BadInput(
            f"rule {quoted(text)}: at most one subject and one of compute, end_to_end or metric may precede the metric"
        )
    return subjects[0] if subjects else None, measures[0] if measures else "compute"


def _parse_place(text: str, metric: str, place: str | None) -> tuple[int | None, str | None]:
    if metric in (*TIMED, *PLACED):
        if place is None or not place.startswith("b"):
            why = "is measured at a batch size" if metric in TIMED else "depends on the batch"
            raise BadInput(f"rule {quoted(text)}: {metric} {why}; write {metric}@b8 for batch 8")
        return int(_parse_number(text, place[1:], BATCH)), None
    if metric in (*COUNTED, FITTED) and place is not None:
        raise BadInput(f"rule {quoted(text)}: {metric} is the same at every batch size and link; drop @{place}")
    return None, place


def _parse_number(text: str, part: str, quantity: Quantity) -> float:
    try:
        return quantity.from_text(part)
    except BadInput as error:
        raise BadInput(f"rule {quoted(text)}: {error}") from None


def _parse_unit(text: str, measure: str, metric: str, match: re.Match[str]) -> int:
    unit = match["unit"]
    if unit is None:
        return 1
    if measure == OWN or metric not in IN_BYTES:
        raise BadInput(f"rule {quoted(text)}: {unit} goes with {', '.join(IN_BYTES)}, not with {metric}")
    if match["number"] is None and match["sign"] not in ("+", "-"):
        raise BadInput(f"rule {quoted(text)}: {unit} goes with a number of its own, such as dense + 20 {unit}")
    return UNITS[unit]


def _parse_bound(text: str, match: re.Match[str], unit: int) -> tuple[float, float]:
    if match["number"] is not None:
        return 0.0, unit * _parse_number(text, match["number"], LIMIT)
    by = 0.0 if match["by"] is None else _parse_number(text, match["by"], LIMIT)
    if match["sign"] == "*":
        return by, 0.0
    return 1.0, unit * (-by if match["sign"] == "-" else by)
