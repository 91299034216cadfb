"""Exported graphs on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any


def graph_lines(rows: Sequence[Mapping[str, Any]], *, kept: Sequence[str] | None) -> list[str]:
    """One line a graph; then what the search for sites to keep in FP32 came to, None where none was made."""
    lines = [
        f"{row['path']}: {row['precision']}, opset {row['opset']}, {row['size_bytes'] / 1e6:.2f} MB" for row in rows
    ]
    if kept:
        lines.append(f"kept in FP32: {', '.join(kept)}")
    elif kept is not None:
        lines.append("nothing had to be kept in FP32 on these images, so the graph is fp16, not mixed")
    return lines
