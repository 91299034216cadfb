"""The table of a convolutional network with real weights."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table


def real_convnet(record: Mapping[str, Any]) -> str:
    """A line a method, a column a share of the MACs."""
    rows = record["rows"]
    shares = sorted({row["share"] for row in rows}, reverse=True)
    by_key = {(row["method"], row["share"]): row for row in rows}

    def cell(method: str, share: float) -> str:
        row = by_key.get((method, share))
        return "-" if row is None else f"{row['error']:.3f}, {row['agreement']:.1%}"

    def cost(method: str) -> str:
        row = by_key.get((method, shares[0]))
        return "-" if row is None else f"{row['cpu_s']:.0f}"

    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [[method, *(cell(method, share) for share in shares), cost(method)] for method in methods]
    text = (
        f"A convolutional network, {record['model']}: ImageNet weights, {record['crops']} crops to fit and "
        f"{record['held_out']} of other photographs to judge. Relative error of the logits and agreement of the top "
        f"class with the dense model, by the share of the MACs that stays; CPU seconds of `reduce` at {shares[0]:g} on "
        f"{record['cpu']}, {record['threads']} thread(s):"
    )
    head = ("method", *(f"{share:g} of the MACs" for share in shares), "CPU s")
    return "\n\n".join([text, table(head, lines), *record.get("remarks", [])])
