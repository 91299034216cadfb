"""Calibrate a checkpoint: calib's one pass at the sites of a vision transformer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from calib.collect import collect
from calib.images import Images
from calib.moments import MlpMoments, Moments

from . import vit
from .checkpoint import Checkpoint
from .errors import BadInput
from .files import sha256_of_file
from .inputs import lineage_for_moments


def calibrate(
    checkpoint: Checkpoint,
    images: Images,
    *,
    batch_size: int,
    device: str = "cpu",
    attention_system: bool = False,
    done: Callable[[int], None] | None = None,
) -> Moments:
    """The moments of every site of the model, with the lineage that ties them to it.

    Raises BadInput where there is no site.
    """
    sites = vit.calibration_sites(checkpoint.model)
    if not sites:
        reasons = "; ".join(f"{refusal.name}: {refusal.reason}" for refusal in vit.parts(checkpoint.model).refused)
        raise BadInput(f"nothing to calibrate: no site of this model can be reduced ({reasons})")
    return collect(
        checkpoint.model.to(device),
        sites,
        images.batches(batch_size),
        device=device,
        attention_system=attention_system,
        lineage=lineage_for_moments(checkpoint, images),
        progress=done,
    )


def summary_of_moments(moments: Moments, path: Path) -> dict[str, Any]:
    """What a moments file holds, for people and machines."""
    mlps = sum(isinstance(site, MlpMoments) for site in moments.sites.values())
    return {
        "moments": str(path),
        "sha256": sha256_of_file(path),
        "size_bytes": path.stat().st_size,
        "images": moments.images,
        "mlp_sites": mlps,
        "attention_sites": len(moments.sites) - mlps,
        "lineage": dict(moments.lineage),
    }
