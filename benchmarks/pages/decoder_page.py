"""Tables of decoders, from the record of benchmarks/decoders/trained_decoder.py."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table


def trained_decoder(record: Mapping[str, Any]) -> str:
    """What methods leave of a small decoder's perplexity."""
    dense, *others = record["rows"]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in others:
        key = (row["part"], f"{row['sparsity']:g}")
        cells.setdefault(key, {})[row["method"]] = f"{row['ratio']['value']:.3f}"
    methods = list(dict.fromkeys(method for own in cells.values() for method in own))
    whole = dense["perplexity"]["value"]
    text = (
        f"A Llama of three blocks, two heads to a key and value, trained for {record['training_s']:.0f} s on the text "
        f"of Python's own help, letter by letter (perplexity {whole:.2f}): perplexity on text that "
        "nobody saw, as a multiple of the dense one's, by what is removed and how it is repaired:"
    )
    rows = [[part, sparsity, *(own.get(each, "-") for each in methods)] for (part, sparsity), own in cells.items()]
    return text + "\n\n" + table(["removed", "share", *methods], rows)
