"""Reports of a reduction on each part of a site, in numbers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from corp_deploy.algebra.ridges import RidgeChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFit:
    """The refit of a linear layer by the closed loop.

    It is a site's last layer, fitted toward the dense residual stream, or its first one, fitted toward its dense output
    (the alignment).

    Errors are mean squares per token of the residual, before and after the refit, on the images of the fit and on those
    held out to choose `strength`, the ridge toward the weights before the refit (None: no refit lowered the held-out
    error). A held-out error well above `error` is over-fitting. `energy` is the variance of the target per token.
    """

    strength: float | None
    energy: float | None
    error_recovered: float
    error: float
    error_recovered_held_out: float
    error_held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A part judged on statistics of images that it was not fitted to: energy and error as in SiteReport."""

    energy: float
    error: float

    @property
    def share(self) -> float:
        """The share of the dense signal that is lost."""
        return self.error / self.energy if self.energy > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """The reduction of one part of a site, such as mlp, heads, qk or v; `qk` and `v` are of the heads left.

    Errors are mean squares on the calibration images: of the output per token for `mlp`, `heads` and `v`, of the logits
    for `qk`. `energy` is the dense signal in the same unit, so error / energy is the share lost. `held_out` is set if
    held-out statistics were given: a share lost well above the calibration images' is over-fitting. `ridge_fit` is set
    if groups of images chose the ridge, `loop` if the closed loop refitted the site's last layer, or the convolution
    that reads the part's channels, `alignment` if it aligned the first one.
    """

    site: str
    part: str
    width_dense: int
    width_asked: float
    width: int
    energy: float
    error_uncompensated: float
    error: float
    r2: float
    condition: float
    ridge: float
    held_out: HeldOut | None = None
    ridge_fit: RidgeChoice | None = None
    loop: LoopFit | None = None
    alignment: LoopFit | None = None


def as_allocated(reports: Iterable[SiteReport]) -> list[SiteReport]:
    """Return reports of widths that were given one by one: each was asked for exactly."""
    return [replace(report, width_asked=float(report.width)) for report in reports]
