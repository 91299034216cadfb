"""The tables of convolutional networks, from the record of benchmarks/quality/convnets.py."""

from benchmarks.pages.latency_page import P50
from benchmarks.pages.markdown import Column, Row, cross_table, interval, mean_rows, paragraphs, table_of

HALF = 0.5


def methods(record: Row) -> str:
    """Return the table of errors by method on the digits' ResNet."""
    by = ("way", "asked", "removed_of_model")
    rows = mean_rows(record["rows"], by, ("relative_error", "agreement", "accuracy"))
    error = {row["way"]: row["relative_error"] for row in rows if row["asked"] == HALF}
    seeds = len({row["seed"] for row in record["rows"]})
    text = (
        f"The digits' ResNet, {record['calibration_images']} calibration images, uniform widths, equal for every "
        "method: relative logit error, top-1 agreement and accuracy on held-out images by the removed share of the "
        f"MACs (means over {seeds} choices of images). With half of the MACs, the error of preset best is "
        f"{error['grail'] / error['best']:.0f} times smaller than grail's, and with the closed loop "
        f"{error['grail, symmetric closed loop'] / error['best, closed loop']:.0f} times smaller than grail's with the "
        "symmetric closed loop:"
    )
    figures = "{relative_error:.3f}; {agreement:.1%}; {accuracy:.1%}"
    return paragraphs(text, cross_table(rows, {"method": "{way}"}, "{removed_of_model:.1%} removed", figures))


def latency(record: Row) -> str:
    """Return the table of speed-ups at half of the MACs."""
    rows = [{**each, **row} for each in record.get("latency", []) for row in each["rows"]]
    columns: dict[str, Column] = {
        "model": "{model}",
        "MACs": "{macs_share:.2f}",
        "batch": "{batch}",
        **P50,
        "speed-up": lambda row: interval(row["speedup"], unknown=" (no interval)"),
        "A/A noise": lambda row: interval(row["noise"], unknown=" (no interval)"),
    }
    text = (
        "ONNX Runtime on 2 CPU cores, FP32, random weights at uniform widths, interleaved in one process, with few "
        "rounds on a shared machine. The intervals and the A/A run show the noise:"
    )
    return paragraphs(text, table_of(rows, columns)) if rows else ""


def convnets(record: Row) -> str:
    """Return both tables, the second under a heading."""
    faster = latency(record)
    return paragraphs(methods(record), faster and "## Speed-up", faster)
