"""The table of graphs that take pixels."""

from typing import Any

from benchmarks.pages.markdown import table

WAYS = ("float32", "uint8", "folded")


def pixels(record: dict[str, Any]) -> str:
    """Errors by model, precision and what the graph takes."""
    text = (
        f"Pixels in (`python -m benchmarks.speed.pixels`, {record['setting']['images']} images): relative error of "
        f"each graph, computed as it is typed, against the model in float32, fed normalised images or their pixels "
        "(`export --input uint8`: folded into the first convolution in FP32, normalised ahead below), and what folding "
        "would cost below FP32:"
    )
    errors = {(row["model"], row["precision"], row["input"]): row["relative_error"] for row in record["rows"]}
    rows = []
    for model, precision in dict.fromkeys((row["model"], row["precision"]) for row in record["rows"]):
        own = (errors.get((model, precision, way)) for way in WAYS)
        rows.append([model, precision, *("-" if error is None else f"{error:.2e}" for error in own)])
    return text + "\n\n" + table(["model", "graph", "normalised", "pixels", "pixels, folded"], rows)
