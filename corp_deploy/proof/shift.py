"""Do these images look like the calibration images? Pixel range, and mean and covariance at every site."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from calib.collect import collect
from calib.moments import ChannelMoments, Moments
from corp_deploy.families.family import sites_of
from corp_deploy.families.sites import calibration_taps
from corp_deploy.reduction.calibrate import PIXEL_RANGE
from corp_deploy.reduction.moments import require_same_model
from corp_deploy.store.checkpoint import Checkpoint
from ground.files import whole
from perf.parity import structure
from perf.parity.shift import Scatter, Shift, Stats, shift_of_sites, site_shift
from perf.parity.structure import StructuralTest

PARTS = 8


def _stats(moments: Moments, name: str) -> Stats:
    """Mean and covariance of x of an MLP, of z of an attention layer."""
    site = moments.sites[name]
    if isinstance(site, ChannelMoments):
        mean, covariance = site.mean_F, site.covariance_FF
    else:
        mean, covariance = site.z_mean_C, site.z_covariance_CC
    return Stats(images=moments.images, mean_F=mean.numpy(), covariance_FF=covariance.numpy())


def shift_of_images(dense: Checkpoint, moments: Moments, pixels: NDArray[np.float32]) -> Shift | None:
    """Compare the images with the calibration at every site that the moments hold; None for too few of them.

    Raises BadInput for moments of another model.
    """
    require_same_model(dense.model, moments)
    if len(pixels) < PARTS:
        return None
    sites = [site for site in calibration_taps(dense.model, sites_of(dense.model)) if site.name in moments.sites]
    each = len(pixels) // PARTS
    scatter = {site.name: Scatter(_stats(moments, site.name).mean_F) for site in sites}
    for start in range(0, PARTS * each, each):
        batches = torch.from_numpy(pixels[start : start + each]).split(16)
        part = collect(dense.model, sites, batches, device="cpu")
        for name, parts in scatter.items():
            parts.add(_stats(part, name))
    found = [site_shift(name, _stats(moments, name), parts) for name, parts in scatter.items()]
    return shift_of_sites(found, images=PARTS * each)


def pixel_range(moments: Moments, pixels: NDArray[np.float32]) -> list[StructuralTest]:
    """Whether there are images enough to compare with the calibration, and those with values outside what it saw."""
    return [*_too_few(len(pixels)), *_outside(moments, pixels)]


def _too_few(count: int) -> Iterator[StructuralTest]:
    """From fewer than 8 images no noise can be told."""
    if count < PARTS:
        reason = f"{count} images are too few to be compared with those of calibration; at least {PARTS} are needed"
        yield StructuralTest(
            candidate="calibration images", test="shift", status="NOTED", value=count, bound=PARTS, reason=reason
        )


def _outside(moments: Moments, pixels: NDArray[np.float32]) -> list[StructuralTest]:
    """Nothing where the moments don't tell the range."""
    told = moments.lineage.get(PIXEL_RANGE)
    if told is None:
        return []
    with whole("moments: their pixel range"):
        bounds = [tuple(map(float, part.split(":"))) for part in told.split("+")]
        low, high = min(bound[0] for bound in bounds), max(bound[1] for bound in bounds)
    return [structure.calibrated_range("calibration images", pixels, low=low, high=high)]
