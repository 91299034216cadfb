"""Exported graphs on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from ground.precision import PRECISIONS


def graph_lines(rows: Sequence[Mapping[str, Any]], *, kept: Mapping[str, Sequence[str]]) -> list[str]:
    """One line a graph; then what each search for sites to keep in FP32 came to, by the mixed precision's word."""
    lines = [
        f"{row['path']}: {row['precision']}, opset {row['opset']}, {row['size_bytes'] / 1e6:.2f} MB" for row in rows
    ]
    lines += [
        f"{row['path']}: takes uint8 pixels, normalised {_where(row['normalised'])}"
        for row in rows
        if row.get("normalised")
    ]
    lines += [
        f"{row['path']}: fusion broken at {', '.join(row['fusion_breaks'])}" for row in rows if row.get("fusion_breaks")
    ]
    for name, sites in kept.items():
        of_several = f" in {name}" if len(kept) > 1 else ""
        if sites:
            lines.append(f"kept in FP32{of_several}: {', '.join(sites)}")
        else:
            pure = PRECISIONS[name].pure
            lines.append(f"nothing had to be kept in FP32 on these images, so the graph is {pure}, not {name}")
    return lines


def _where(place: str) -> str:
    """A module by its path, or ahead of all."""
    return place if " " in place else f"in {place}"
