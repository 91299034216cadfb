"""The table of latencies in ONNX Runtime on the CPU."""

from typing import Any

from benchmarks.pages.markdown import interval, table


def cpu_latency(record: dict[str, Any]) -> str:
    """Return the table of latencies, dense against reduced."""
    rows = []
    for each in record["rows"]:
        for line in each["rows"]:
            p50 = [line["p50_ms"][name] for name in ("dense", "reduced")]
            shown = ["-" if value is None else f"{value[0]:.1f}" for value in p50]
            realised = "-" if line["realised_share"] is None else f"{line['realised_share']:.0%}"
            head = [each["model"], each["heads"], f"{each['macs_share']:.2f}", str(line["batch"])]
            rows.append([*head, *shown, interval(line["speedup"]), interval(line["noise"]), realised])
    names = ["model", "heads", "MACs", "batch", "dense p50 ms", "reduced p50 ms", "speed-up", "A/A noise", "realised"]
    return "ONNX Runtime on 2 CPU cores, FP32, random weights, interleaved in one process:\n\n" + table(names, rows)
