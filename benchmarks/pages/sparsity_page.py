"""The table of 2:4 sparsity against narrower layers at equal multiply-adds."""

from typing import Any

from benchmarks.pages.markdown import table


def sparsity(record: dict[str, Any]) -> str:
    """Return a table of errors and nominal shares of the MACs with a column for each model."""
    rows = {(row["model"], row["method"]): row for row in record["rows"]}
    models = list(dict.fromkeys(model for model, _ in rows))
    methods = list(dict.fromkeys(method for _, method in rows))
    lines = [[method, *(_cell(rows.get((model, method))) for model in models)] for method in methods]
    sizes = ", ".join(_size(record, model) for model in models)
    text = (
        "2:4 sparsity (`reduce --sparse 2:4`) against narrower layers (`best`): error of the outputs on held-out "
        "inputs, relative to the centred dense outputs, and the share of the dense MACs, counted as if every zero were "
        f"skipped. `2:4` is the default: the exact cost chooses the weights, and a refit follows. Calibration and "
        f"held-out inputs: {sizes}."
    )
    return "\n\n".join([text, table(["method", *models], lines)])


def _cell(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['error']:.4f} at {row['macs_share']:.2f}"


def _size(record: dict[str, Any], model: str) -> str:
    row = next(row for row in record["rows"] if row["model"] == model)
    return f"{model} {row['fitted']} and {row['held_out']}"
