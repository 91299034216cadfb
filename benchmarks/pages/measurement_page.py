"""Error rates of the gate, and the overhead of the timing code."""

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table

Record = Mapping[str, Any]


def gate_alarms(record: Record) -> str:
    """Return the table of gates on a model against itself, by the number of other programs."""
    every, plan = record["all"], record["plan"]
    below = math.ceil(1e4 * every["false_alarms_below"]) / 100  # a bound is rounded up
    text = (
        "A model is compared with itself on two shared cores while none to four other processes compute, sweep memory "
        f"or write files, all the time or in turns. The rule is `{record['rule']}`, with at most "
        f"{plan['time_limit_s']:g} seconds for each comparison. Every FAIL is a false alarm: there are {every['FAIL']} "
        f"in {every['comparisons']} comparisons, so their rate is below {below:.2f} % at 95 % confidence. The naive "
        "comparison uses the means of 20 calls of one copy, then of the other:"
    )
    lines = [
        [
            count,
            *(str(row[key]) for key in ("comparisons", "PASS", "INCONCLUSIVE", "FAIL", "naive_alarms")),
            f"{row['intervals_that_hold_one']} of {row['intervals']}",
            f"{100 * row['median_half_width']:.2f} %",
            f"{row['median_seconds']:.1f}",
        ]
        for count, row in [*record["by_processes"].items(), ("all", every)]
    ]
    head = ["other processes", "comparisons", "PASS", "INCONCLUSIVE", "FAIL", "naive alarms",
            "95 % interval contains 1", "median half-width", "median s"]  # fmt: skip
    share = every["intervals_that_hold_one"] / every["intervals"]
    after = (
        f"The interval contains the true ratio in {100 * share:.0f} % instead of 95 % of the comparisons: a load that "
        "starts and stops within a measurement makes it too narrow. The margin of 3 % in the rule allows for that."
    )
    return "\n\n".join([text, table(head, lines), after])


def harness_overhead(record: Record) -> str:
    """Return the overhead of the timing code in words."""
    share = (record["inside_us"] + record["around_us"]) / (1e3 * record["call_ms"])
    return (
        f"The timing code takes {record['inside_us']:.2f} µs inside the timed section and {record['around_us']:.1f} µs "
        f"around it: {100 * share:.2f} % of a call of {record['call_ms']:.0f} ms."
    )
