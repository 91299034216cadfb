"""The table of 2:4 sparsity against narrower layers at equal multiply-adds."""

from benchmarks.pages.markdown import Row, cross_table, paragraphs


def sparsity(record: Row) -> str:
    """Return a table of errors and nominal shares of the MACs with a column for each model."""
    sizes = {row["model"]: f"{row['model']} {row['fitted']} and {row['held_out']}" for row in record["rows"]}
    text = (
        "2:4 sparsity (`reduce --sparse 2:4`) against narrower layers (`best`): error of the outputs on held-out "
        "inputs, relative to the centred dense outputs, and the share of the dense MACs, counted as if every zero were "
        f"skipped. `2:4` is the default: the exact cost chooses the weights, and a refit follows. Calibration and "
        f"held-out inputs: {', '.join(sizes.values())}."
    )
    cell = "{error:.4f} at {macs_share:.2f}"
    return paragraphs(text, cross_table(record["rows"], {"method": "{method}"}, "{model}", cell))
