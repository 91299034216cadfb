"""What a file of moments holds, told without its sums."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calib.moments import Moments
from calib.patch_moments import PatchMoments
from ground.files import sha256_of_file


def summary_of_moments(moments: Moments, path: Path) -> dict[str, Any]:
    """What a moments file holds, for people and machines."""
    kinds, widths, chosen = [], set[int](), dict[str, list[int]]()
    for name, site in moments.sites.items():  # each is read from the file when it is asked for
        kinds.append(site.kind)
        if isinstance(site, PatchMoments) and site.channels_GR is not None:
            chosen[name] = [site.channels_GR.numel(), site.map_sum_GC.numel()]
        widths |= set() if site.system_width is None else {site.system_width}
    return {
        "moments": str(path),
        "sha256": sha256_of_file(path),
        "size_bytes": path.stat().st_size,
        "images": moments.images,
        "mlp_sites": kinds.count("mlp"),
        "attention_sites": kinds.count("attention"),
        "convolutions": kinds.count("convolution"),
        "system_widths": sorted(widths),
        "patches_of": chosen,
        "lineage": dict(moments.lineage),
    }


def reference_of_summary(summary: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The record that tells which moments a result rests on, under the name that they go by."""
    return {"kind": "corp-deploy/moments-reference", "version": 1, **summary, "moments": name}
