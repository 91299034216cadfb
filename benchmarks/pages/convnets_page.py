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
    """What methods lose on the digits' ResNet."""
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
        f"The digits' ResNet, {record['calibration_images']} images to calibrate on, uniform widths, the same for "
        "every method: relative logit error, top-1 agreement and accuracy on held-out images by the share of the "
        f"MACs removed (means of {seeds} choices of images). At half, preset best errs "
        f"{_ratio(rows, 'best', 'grail')} times less than grail, with its closed loop "
        f"{_ratio(rows, 'best, closed loop', 'grail, symmetric closed loop')} times less than grail with the "
        "symmetric one:"
    )
    return text + "\n\n" + table(["method", *(f"{share:.1%} removed" for share in removed.values())], lines)


def _interval(value: Sequence[float | None] | None) -> str:
    """Middle, low and high; too few rounds give no interval."""
    if value is None or value[0] is None:
        return "-"
    middle, low, high = value
    return f"{middle:.2f} (no interval)" if high is None else f"{middle:.2f} ({low:.2f} to {high:.2f})"


def latency(record: Mapping[str, Any]) -> str:
    """How much faster shapes of half the MACs are."""
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
        "ONNX Runtime on 2 CPU cores, FP32, random weights at uniform widths, interleaved in one process, few rounds "
        "on a shared machine (the intervals and the dense model against itself show how much noise that adds):"
    )
    return text + "\n\n" + table(names, lines)


def convnets(record: Mapping[str, Any]) -> str:
    """Both tables, the second under a heading of its own."""
    faster = latency(record)
    return "\n\n".join([methods(record), *(["## How much faster", faster] if faster else [])])
