"""Latencies of blocks at each width, on the terminal."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from corp_deploy.planning.latency import LatencyTables
from corp_deploy.planning.schedule import MERGE

DENSE, ALL_TOKENS = "dense model", "dense model with all tokens"


def latency_rows(tables: LatencyTables, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each block and width, with median milliseconds by batch size, the dense model last."""
    named = {**tables.by_name, DENSE: tables.dense} | ({ALL_TOKENS: tables.all_tokens} if tables.all_tokens else {})
    return [
        {"block": name, "width": width, "p50_ms": {str(size): table.latency_ms(width, size) for size in batches}}
        for name, table in named.items()
        for width in table.widths
    ]


def latency_view(rows: Sequence[dict[str, Any]], batches: Sequence[int]) -> Table:
    table = Table("block", "width", *(f"batch {size} (ms)" for size in batches))
    for row in rows:
        width = "-" if row["block"] in (DENSE, ALL_TOKENS) or row["block"].startswith(MERGE) else str(row["width"])
        table.add_row(row["block"], width, *(f"{row['p50_ms'][str(size)]:.3f}" for size in batches))
    return table
