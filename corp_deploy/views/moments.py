"""Moments on the terminal."""

from collections.abc import Mapping
from typing import Any


def line_of_moments(summary: Mapping[str, Any], noun: str = "images") -> str:
    """A summary in one line; `noun` is what was calibrated on."""
    sites = summary["mlp_sites"] + summary["attention_sites"]
    size = f"{sites} sites, {summary['images']} {noun}, {summary['size_bytes'] / 1e6:.1f} MB"
    widths = ", ".join(map(str, summary["system_widths"]))
    covered = f"; per-image systems for head widths up to {widths}" if widths else ""
    return f"{summary['moments']}: {size}{covered}"
