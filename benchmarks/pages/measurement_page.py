"""Error rates of the gate, and the overhead of the timing code."""

import math

from benchmarks.pages.markdown import Column, Row, paragraphs, table_of

LOADS = {
    "quiet": "none",
    "starts or stops": "one to three processes that start or stop",
    "turns": "none to four processes, all of the time or in turns",
}


def gate_alarms(record: Row) -> str:
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
    columns: dict[str, Column] = {
        "other processes": "{load}",
        "load average": "{median_load_average:.1f}",
        "comparisons": "{comparisons}",
        "with interval": "{intervals}",
        "interval contains 1": lambda row: _share(row, "hold_one"),
        "older interval contains 1": lambda row: _share(row, "bootstrap_hold_one"),
        "width over the older's": "{width_to_bootstrap:.2f}",
        "false alarms": lambda row: _failed(row, "equal"),
        "false alarms, swapped": lambda row: _failed(row, "swapped"),
        "FAIL if 5 % slower": lambda row: _failed(row, "slower by 5 %"),
        "naive mean off by more than 3 %": "{naive_apart}",
    }
    rows = [{"load": LOADS[name], **row} for name, row in tallies.items()]
    after = "The widths are compared over all rounds of a comparison. The naive mean is that of 20 calls of each copy."
    return paragraphs(text, table_of(rows, columns), after)


def _share(row: Row, count: str) -> str:
    return f"{row[count]} ({100 * row[count] / row['intervals']:.1f} %)"


def _failed(row: Row, change: str) -> str:
    return str(row["verdicts"][change].get("FAIL", 0))


def harness_overhead(record: Row) -> str:
    """Return the overhead of the timing code in words."""
    share = (record["inside_us"] + record["around_us"]) / (1e3 * record["call_ms"])
    return (
        f"The timing code takes {record['inside_us']:.2f} µs inside the timed section and {record['around_us']:.1f} µs "
        f"around it: {100 * share:.2f} % of a call of {record['call_ms']:.0f} ms."
    )
