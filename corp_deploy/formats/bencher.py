"""Bencher Metric Format: a JSON object of benchmarks, their measures, and a value of each with its interval."""

import json
from collections import defaultdict
from collections.abc import Iterable

from .figures import Figure, Measure

# The names that Bencher has for measures, the units of those that it knows, and the factor to these units.
MEASURES: dict[Measure, tuple[str, float]] = {
    "p50": ("latency", 1e6),  # nanoseconds
    "p90": ("latency-p90", 1e6),
    "throughput": ("throughput", 1.0),  # operations, here images, in a second
    "size": ("file-size", 1.0),
}
LONGEST_NAME = 1024


def bmf_from_figures(figures: Iterable[Figure]) -> str:
    """Return the figures as JSON; a benchmark is a model at a batch size, or a model if the figure needs none."""
    benchmarks: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for figure in figures:
        measure, factor = MEASURES.get(figure.measure, (figure.measure.replace(" ", "-"), 1.0))
        at = "" if figure.batch is None else f" at batch {figure.batch}"
        benchmark = " ".join(filter(None, (figure.subject, figure.output)))[: LONGEST_NAME - len(at)] + at
        ends = {"value": figure.value, "lower_value": figure.low, "upper_value": figure.high}
        benchmarks[benchmark][measure] = {end: each * factor for end, each in ends.items() if each is not None}
    return json.dumps(benchmarks, indent=1, allow_nan=False) + "\n"
