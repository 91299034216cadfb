"""The page of 2:4 weights: beside widths at equal multiply-adds, and what TensorRT-RTX makes of them."""

from typing import Any

from benchmarks.pages.markdown import table


def sparsity(record: dict[str, Any]) -> str:
    """Error and nominal share of the MACs, a column a model."""
    rows = {(row["model"], row["method"]): row for row in record["rows"]}
    models = list(dict.fromkeys(model for model, _ in rows))
    methods = list(dict.fromkeys(method for _, method in rows))
    lines = [[method, *(_cell(rows.get((model, method))) for model in models)] for method in methods]
    sizes = ", ".join(_size(record, model) for model in models)
    text = (
        "Weights made 2:4 sparse (`reduce --sparse 2:4`) beside narrower layers (`best`): error of the outputs on "
        "held-out inputs, relative to the dense ones about their mean, and the share of the dense MACs, of 2:4 "
        f"counted as if every zero were skipped; `2:4` is the default, patterns by exact cost, refitted. Fitted to and "
        f"judged by: {sizes}."
    )
    return "\n\n".join([text, table(["", *models], lines)])


def _cell(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['error']:.4f} at {row['macs_share']:.2f}"


def _size(record: dict[str, Any], model: str) -> str:
    row = next(row for row in record["rows"] if row["model"] == model)
    return f"{model} {row['fitted']} and {row['held_out']}"
