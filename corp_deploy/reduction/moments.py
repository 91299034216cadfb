"""Moments files as reductions read them: the statistics of one site, checks against a model, summaries."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from calib.inputs import InputSet
from calib.moments import Moments
from calib.patch_moments import PatchMoments
from corp_deploy.store.input_sets import MERGING, merging_text, model_digest, preprocessing_text
from corp_deploy.traced.models.sites import Site
from ground.errors import BadInput
from ground.files import sha256_of_file

from .kinds import kind_of

OfSite = TypeVar("OfSite")


def site_moments(site: Site, moments: Moments, device: torch.device) -> Any:
    """Return the statistics of one site, on the device; raise BadInput if the moments lack it."""
    return kind_of(site).moments_at(site, moments, device)


def splits_at(site: Site, moments: Moments, own: OfSite, device: torch.device) -> tuple[OfSite, OfSite] | None:
    """Return the site's statistics on two halves of the images, given `own` on all; None without groups of images."""
    if moments.half is None:
        return None
    half: OfSite = site_moments(site, moments.half, device)
    assert type(half) is type(own), site.name
    return half, kind_of(site).rest_of(own, half)


def require_disjoint(moments: Moments, held_out: Moments) -> None:
    """Raise BadInput if any image is in both moments: held-out images must not be fitted to."""
    common = int(torch.isin(held_out.image_ids, moments.image_ids).sum())
    if common:
        raise BadInput(
            f"held-out moments: {common} of their {held_out.images} images are calibration images too; calibrate them "
            "apart: calibrate --hold-out N writes both"
        )


def without_held_out(images: InputSet | None, held_out: Moments | None) -> InputSet | None:
    """Return the images without those of the held-out moments; raise BadInput if none is left."""
    if images is None or held_out is None or not len(held_out.image_ids):
        return images
    stay = (~torch.isin(images.ids, held_out.image_ids)).nonzero().squeeze(1).tolist()
    if not stay:
        raise BadInput(
            f"all {images.count} {images.noun} are those of the held-out moments, which only judge; give the "
            f"{images.noun} of the calibration"
        )
    return images if len(stay) == images.count else images.subset(stay)


def merging_note(model: nn.Module, moments: Moments) -> str:
    """Return a note if tokens are merged in another way than when the moments were taken, else an empty text."""
    here, there = merging_text(model), moments.lineage.get(MERGING, "")
    if here == there:
        return ""
    was = f"while tokens were merged as {there}" if there else "without merged tokens"
    return f"the moments were taken {was}; calibrate with the same --merge-tokens, --merge-metric and --merge-how"


def require_same_model(model: nn.Module, moments: Moments) -> None:
    """Raise BadInput unless the moments are of exactly these weights, and of images prepared as this model asks."""
    digest, moments_digest = model_digest(model), moments.lineage.get("model", "none")
    if digest != moments_digest:
        raise BadInput(
            f"the moments were taken on another model (sha256 {moments_digest[:16]}..., this model is "
            f"{digest[:16]}...); calibrate this model, or give the weights the moments were taken with"
        )
    here, there = preprocessing_text(model), moments.lineage.get("preprocessing", "none")
    if here != there:
        raise BadInput(
            f"the moments were taken with another preprocessing: theirs is {there}, this model's is {here}; calibrate "
            "again, or give the same name, --mean, --std, --crop-pct, --interpolation and --crop-mode as for calibrate"
        )


def summary_of_moments(moments: Moments, path: Path) -> dict[str, Any]:
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
    """Return the record that names the moments that a result rests on."""
    return {"kind": "corp-deploy/moments-reference", "version": 1, **summary, "moments": name}
