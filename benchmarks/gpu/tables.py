"""What the tables of all parts say alike."""

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def ratio(figures: Sequence[float | None] | None) -> str:
    """A value with its interval, an open end left out."""
    if figures is None or figures[0] is None:
        return "-"
    value, low, high = figures
    return f"{value:.2f}" + ("" if low is None or high is None else f" ({low:.2f} to {high:.2f})")


def machine(record: Record) -> str:
    """What a reader must know of the machine."""
    here = record["environment"]
    if here["gpu"] is None:
        return f"on a CPU ({here['cpu']}), torch {here['torch']}, where these numbers only show that the scripts run"
    return (
        f"on {here['gpu']} (compute capability {here['sm']}), driver {here['driver']}, torch {here['torch']}, "
        f"CUDA {here['torch_cuda']}, timm {here['timm']}"
    )
