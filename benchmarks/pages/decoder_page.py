"""Tables of decoders, from the record of benchmarks/decoders/trained_decoder.py."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table


def trained_decoder(record: Mapping[str, Any]) -> str:
    """Return the table of a small decoder's perplexity by method."""
    dense, *others = record["rows"]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in others:
        key = (row["part"], f"{row['sparsity']:g}")
        cells.setdefault(key, {})[row["method"]] = f"{row['ratio']['value']:.3f}"
    methods = list(dict.fromkeys(method for own in cells.values() for method in own))
    whole = dense["perplexity"]["value"]
    text = (
        f"A Llama with three blocks and two query heads per key/value head, trained for {record['training_s']:.0f} s "
        f"on the text of Python's help, letter by letter (perplexity {whole:.2f}). The table shows the perplexity on "
        "held-out text as a multiple of the dense model's perplexity, by removed part and method:"
    )
    rows = [[part, sparsity, *(own.get(each, "-") for each in methods)] for (part, sparsity), own in cells.items()]
    return text + "\n\n" + table(["removed", "share", *methods], rows)
