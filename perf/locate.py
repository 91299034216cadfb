"""PURE: where a link breaks: block outputs of both sides compared, relative to each block's own FP16 noise."""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIMIT = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where a failing link breaks. `site` is None when no block stands out; `command` mends it where a command can."""

    link: str
    site: str | None
    measure: str
    value: float
    noise: float
    largest_activation: float
    half_limit: float
    reason: str
    command: str
