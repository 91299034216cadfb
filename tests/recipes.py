"""Recipes of releases that a test carries out."""

import json
from collections.abc import Mapping
from typing import Any

Tables = Mapping[str, Mapping[str, Any]]
OF_EVERY: Tables = {
    "model": {"model": "dense"},
    "calibration": {"images": "calibration.npy"},
    "held_out": {"images": "held-out.npy"},
    "export": {"precisions": ["fp32"]},
    "bench": {
        "batches": [2], "time_limit_s": 0.5, "half_width": 0.9, "block_ms": 1, "min_rounds": 6, "threads": 1
    },
    "parity": {"max_error": 9.0},
    "samples": {"count": 3},
}  # fmt: skip


def recipe(tables: Tables) -> str:
    """The text: what the tables say, beside what every recipe here has."""
    merged = {name: {**OF_EVERY.get(name, {}), **tables.get(name, {})} for name in {**OF_EVERY, **tables}}
    lines = [
        line
        for name, table in merged.items()
        for line in (
            f"[{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None),
        )
    ]
    return "\n" + "\n".join(lines) + "\n"


RELEASE = recipe({
    "calibration": {"hold_out": 4, "batch_size": 4},
    "held_out": {"images": "held-out.npz", "labels": "held-out.npz"},
    "reduce": {"mlp": 0.3, "attn": 0.5, "align_mlp": 8, "align_head": 8},
    "parity": {"batches": [1, 3]},
    "bench": {"time_limit_s": 2},
    "gate": {"fail_if": ["params >= dense"]},
    "package": {"name": "tiny"},
})  # fmt: skip
"""A release of every stage."""
