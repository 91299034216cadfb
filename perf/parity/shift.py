"""PURE: shift of mean and covariance of a site's features [F] from calibration, against sampling noise.

The noise is estimated from equal parts of the images, because tokens of one image are similar.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.records import Figure

Floats = NDArray[np.float64]
# A site is far off if its distance exceeds NOISE_FACTOR times the expected noise and an absolute limit.
NOISE_FACTOR = 3.0
FAR_MEAN, FAR_COVARIANCE = 0.1, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Mean [F] and covariance [F, F] of a site's features over a number of images."""

    images: int
    mean_F: Floats
    covariance_FF: Floats

    def __post_init__(self) -> None:
        width = self.mean_F.shape
        assert self.images > 0, self.images
        assert len(width) == 1, width
        assert self.covariance_FF.shape == width * 2, (width, self.covariance_FF.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteShift:
    """Distances at one site relative to the calibration's statistics, with those expected from sampling alone.

    mean_distance = ||mean - calibrated|| / sqrt(trace(covariance)); covariance_distance is relative, in the Frobenius
    norm.
    """

    site: str
    mean_distance: Figure
    mean_noise: Figure
    covariance_distance: Figure
    covariance_noise: Figure
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The shift at all sites, NOTED if one is far off."""

    images: int
    status: str
    reason: str
    sites: tuple[SiteShift, ...]


class Scatter:
    """Statistics of equal, disjoint parts of the images at one site; covariances are about the calibrated mean."""

    def __init__(self, centre_F: Floats) -> None:
        self.centre_F = centre_F
        self.images: list[int] = []
        self.means: list[Floats] = []
        self._sum_FF = np.zeros((len(centre_F), len(centre_F)))
        self._square = 0.0

    def add(self, part: Stats) -> None:
        if part.mean_F.shape != self.centre_F.shape:
            raise BadInput(
                f"got width {len(part.mean_F)}, expected the calibrated {len(self.centre_F)}; use the moments of this "
                "model"
            )
        off_F = part.mean_F - self.centre_F
        about_FF = part.covariance_FF + np.outer(off_F, off_F)
        self.images.append(part.images)
        self.means.append(part.mean_F)
        self._sum_FF += about_FF
        self._square += float(np.square(about_FF).sum())

    @property
    def mean_F(self) -> Floats:
        return np.asarray(np.average(self.means, axis=0, weights=self.images), dtype=np.float64)

    def covariance_FF(self) -> Floats:
        off_F = self.mean_F - self.centre_F
        return np.asarray(self._sum_FF / len(self.means) - np.outer(off_F, off_F), dtype=np.float64)

    def mean_scatter(self) -> float:
        return float(np.square(np.stack(self.means) - np.mean(self.means, axis=0)).sum())

    def covariance_scatter(self) -> float:
        return max(self._square - float(np.square(self._sum_FF).sum()) / len(self.means), 0.0)


def shift_of_sites(sites: Sequence[SiteShift], *, images: int) -> Shift:
    far = [
        f"{s.site} (mean {s.mean_distance:.2g}, covariance {s.covariance_distance:.2g})"
        for s in sites
        if s.status == "NOTED"
    ]
    reason = f"all {len(sites)} sites see inputs like those of the calibration"
    if far:
        reason = f"{len(far)} of {len(sites)} sites see other inputs than in calibration: {'; '.join(far[:6])}"
    return Shift(images=images, status="NOTED" if far else "PASS", reason=reason, sites=tuple(sites))


def site_shift(site: str, calibrated: Stats, parts: Scatter) -> SiteShift:
    if len(parts.means) < 2:
        raise BadInput(f"shift at {site}: got {len(parts.means)} part, expected 2 or more; give more images")
    mean_scale = math.sqrt(max(float(np.trace(calibrated.covariance_FF)), np.finfo(float).tiny))
    covariance_scale = max(float(np.linalg.norm(calibrated.covariance_FF)), np.finfo(float).tiny)
    calibration_factor = 1 + sum(parts.images) / calibrated.images
    mean_noise = _noise(parts.mean_scatter(), len(parts.means), calibration_factor) / mean_scale
    covariance_noise = _noise(parts.covariance_scatter(), len(parts.means), calibration_factor) / covariance_scale
    mean_distance = float(np.linalg.norm(parts.mean_F - calibrated.mean_F)) / mean_scale
    covariance_distance = float(np.linalg.norm(parts.covariance_FF() - calibrated.covariance_FF)) / covariance_scale
    far = mean_distance > max(FAR_MEAN, NOISE_FACTOR * mean_noise)
    far |= covariance_distance > max(FAR_COVARIANCE, NOISE_FACTOR * covariance_noise)
    return SiteShift(
        site=site,
        mean_distance=mean_distance,
        mean_noise=mean_noise,
        covariance_distance=covariance_distance,
        covariance_noise=covariance_noise,
        status="NOTED" if far else "PASS",
    )


def _noise(scatter: float, parts: int, calibration_factor: float) -> float:
    """Return the expected distance without a shift, from the parts' scatter; the factor adds calibration's noise."""
    return math.sqrt(scatter / (parts - 1) / parts * calibration_factor)
