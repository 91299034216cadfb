"""Moments on the terminal."""

from collections.abc import Mapping
from typing import Any

from corp_deploy.reduction.overfitting import Overfitting


def line_of_moments(summary: Mapping[str, Any], noun: str = "images") -> str:
    """A summary in one line; `noun` is what was calibrated on."""
    sites = sum(summary[kind] for kind in ("mlp_sites", "attention_sites", "convolutions"))
    size = f"{sites} sites, {summary['images']} {noun}, {summary['size_bytes'] / 1e6:.1f} MB"
    patches = summary["patches_of"]
    widths = ", ".join(map(str, summary["system_widths"]))
    covered = f"; per-image systems for head widths up to {widths}" if widths else ""
    chosen = "".join(f"; patches of {name}: {some} of {every} channels" for name, (some, every) in patches.items())
    return f"{summary['moments']}: {size}{covered}{chosen}"


def lines_of_overfitting(summary: Mapping[str, Any]) -> list[str]:
    """What MLPs cut to half lose on images of the fit and on others, and how many more would help; a line or none."""
    gap = summary.get("overfitting")
    return [] if gap is None else [Overfitting(**gap).sentence("cut to half, MLPs lose")]
