"""What a reduction did to each part of a site, in numbers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from corp_deploy.algebra.ridges import RidgeChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFit:
    """How the closed loop refitted a linear layer: a site's last one toward the dense residual stream, or its first
    one (the alignment) toward what it makes of that stream.

    Mean squares per token of what is lacking: as it was, and as refitted, on the images of the fit and on those held
    out to choose `strength` (of the pull toward the layer as it was; None where no refit was best). A held-out error
    well above `error` is over-fitting. `energy` is the dense stream's variance per token, unknown for an alignment.
    """

    strength: float | None
    energy: float | None
    error_recovered: float
    error: float
    error_recovered_held_out: float
    error_held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A part judged on the statistics of images that it was not fitted to: energy and error as in SiteReport."""

    energy: float
    error: float

    @property
    def share(self) -> float:
        """What is lost of the dense signal."""
        return self.error / self.energy if self.energy > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """What happened to one part (mlp, heads, qk, v) of a site; `heads`: how many, `qk` and `v` are of those left.

    Errors are mean squares on the calibration images: of the output per token for `mlp`, `heads` and `v`, of the
    logits for `qk`. `energy` is the dense signal in the same unit, so error / energy is the share lost. `held_out` is
    there where held-out statistics were given: a share lost well above the calibration images' is over-fitting.
    `ridge_fit` is there where groups of images chose how strong the ridge is, `loop` where the closed loop refitted
    the site's last layer, or the convolution that reads the part's channels, `alignment` where it aligned the first
    one.
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
    """Reports of widths that were given one by one: each was asked for exactly."""
    return [replace(report, width_asked=float(report.width)) for report in reports]
