"""Error rates of the gate, and the overhead of the timing code."""

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table

Record = Mapping[str, Any]


LOADS = {
    "quiet": "none",
    "starts or stops": "one to three processes that start or stop",
    "turns": "none to four processes, all of the time or in turns",
}


def gate_alarms(record: Record) -> str:
    """Return the table of comparisons of a workload with itself, by design."""
    tallies, plan = record["tallies"], record["plan"]
    most = math.ceil(max(plan["limits_s"].values()))
    text = (
        f"A workload of about 1 ms is compared with itself on two shared cores, for at most {most} seconds each time, "
        "while other processes compute, sweep memory or write files. Further jobs used the cores meanwhile, which the "
        f"load average counts. The true ratio is 1, so every FAIL of `{record['rule']}` is a false alarm; with the "
        "copies swapped, the same measurements are judged once more. Comparisons with fewer than six rounds have no "
        "interval. The older interval is the bootstrap over rounds alone, with its own end of the measurement:"
    )
    head = [
        *("other processes", "load average", "comparisons", "with interval"),
        *("interval contains 1", "older interval contains 1", "width over the older's"),
        *("false alarms", "false alarms, swapped", "FAIL if 5 % slower", "naive mean off by more than 3 %"),
    ]
    lines = [
        [
            LOADS[name],
            f"{row['median_load_average']:.1f}",
            str(row["comparisons"]),
            str(row["intervals"]),
            f"{row['hold_one']} ({100 * row['hold_one'] / row['intervals']:.1f} %)",
            f"{row['bootstrap_hold_one']} ({100 * row['bootstrap_hold_one'] / row['intervals']:.1f} %)",
            f"{row['width_to_bootstrap']:.2f}",
            *(str(row["verdicts"][key].get("FAIL", 0)) for key in ("equal", "swapped", "slower by 5 %")),
            str(row["naive_apart"]),
        ]
        for name, row in tallies.items()
    ]
    after = "The widths are compared over all rounds of a comparison. The naive mean is that of 20 calls of each copy."
    return "\n\n".join([text, table(head, lines), after])


def harness_overhead(record: Record) -> str:
    """Return the overhead of the timing code in words."""
    share = (record["inside_us"] + record["around_us"]) / (1e3 * record["call_ms"])
    return (
        f"The timing code takes {record['inside_us']:.2f} µs inside the timed section and {record['around_us']:.1f} µs "
        f"around it: {100 * share:.2f} % of a call of {record['call_ms']:.0f} ms."
    )
