"""The description of the machine in all tables."""

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]


def machine(record: Record) -> str:
    """Return the facts of the machine in words."""
    here = record["environment"]
    if here["gpu"] is None:
        return f"on a CPU ({here['cpu']}), torch {here['torch']}, where these numbers only show that the scripts run"
    return (
        f"on {here['gpu']} (compute capability {here['sm']}), driver {here['driver']}, torch {here['torch']}, "
        f"CUDA {here['torch_cuda']}, timm {here['timm']}"
    )
