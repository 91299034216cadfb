"""The tables of convolutional networks, from the record of benchmarks/quality/convnets.py."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.pages.markdown import table

HALF = 0.5


def _error(rows: Sequence[Mapping[str, Any]], way: str, asked: float) -> float:
    return mean(float(row["relative_error"]) for row in rows if row["way"] == way and row["asked"] == asked)


def _ratio(rows: Sequence[Mapping[str, Any]], ours: str, theirs: str) -> str:
    return f"{_error(rows, theirs, HALF) / _error(rows, ours, HALF):.0f}"


def methods(record: Mapping[str, Any]) -> str:
    """Return the table of errors by method on the digits' ResNet."""
    rows = record["rows"]
    removed = {row["asked"]: row["removed_of_model"] for row in rows}
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = [way]
        for asked in removed:
            found = [row for row in rows if (row["way"], row["asked"]) == (way, asked)]
            figures = [mean(row[name] for row in found) for name in ("relative_error", "agreement", "accuracy")]
            cells.append(f"{figures[0]:.3f}; {figures[1]:.1%}; {figures[2]:.1%}")
        lines.append(cells)
    seeds = len({row["seed"] for row in rows})
    text = (
        f"The digits' ResNet, {record['calibration_images']} calibration images, uniform widths, equal for every "
        "method: relative logit error, top-1 agreement and accuracy on held-out images by the removed share of the "
        f"MACs (means over {seeds} choices of images). With half of the MACs, the error of preset best is "
        f"{_ratio(rows, 'best', 'grail')} times smaller than grail's, and with the closed loop "
        f"{_ratio(rows, 'best, closed loop', 'grail, symmetric closed loop')} times smaller than grail's with the "
        "symmetric closed loop:"
    )
    return text + "\n\n" + table(["method", *(f"{share:.1%} removed" for share in removed.values())], lines)


def _interval(value: Sequence[float | None] | None) -> str:
    """Return the estimate and its interval, which too few rounds don't give."""
    if value is None or value[0] is None:
        return "-"
    middle, low, high = value
    return f"{middle:.2f} (no interval)" if high is None else f"{middle:.2f} ({low:.2f} to {high:.2f})"


def latency(record: Mapping[str, Any]) -> str:
    """Return the table of speed-ups at half of the MACs."""
    lines = []
    for each in record.get("latency", []):
        for row in each["rows"]:
            p50 = [row["p50_ms"][name] for name in ("dense", "reduced")]
            shown = ["-" if value is None else f"{value[0]:.1f}" for value in p50]
            speed = _interval(row["speedup"]), _interval(row["noise"])
            lines.append([each["model"], f"{each['macs_share']:.2f}", str(row["batch"]), *shown, *speed])
    if not lines:
        return ""
    names = ["model", "MACs", "batch", "dense p50 ms", "reduced p50 ms", "speed-up", "A/A noise"]
    text = (
        "ONNX Runtime on 2 CPU cores, FP32, random weights at uniform widths, interleaved in one process, with few "
        "rounds on a shared machine. The intervals and the A/A run show the noise:"
    )
    return text + "\n\n" + table(names, lines)


def convnets(record: Mapping[str, Any]) -> str:
    """Return both tables, the second under its own heading."""
    faster = latency(record)
    return "\n\n".join([methods(record), *(["## Speed-up", faster] if faster else [])])
