"""The number of calibration images that is enough: reductions from moments of more and more images, judged on others.

The error of a fit on images that it has not seen falls as J_inf + c / N with the number N of its images.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.proof.report_input import SIZE_KIND
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.report import SiteReport
from corp_deploy.spec.widths import Widths
from ground.errors import BadInput
from perf.parity.measures import measure_relative_errors
from perf.report.curves import ImagesPoint

from .judging import ScoredInputs, worst_agreement

WITHIN = 0.05
DRAWS, CONFIDENCE, SEED = 2000, 0.95, 0
Floats = NDArray[np.float64]
_Judged = tuple[list[Floats], float | None]
"""The relative errors of each output of one reduced model [N], and the smallest agreement of its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFit:
    """The line loss(N) = `limit` + `slope` / N, and the largest relative deviation of a point from it."""

    limit: float
    slope: float
    residual: float

    def images_within(self, share: float) -> int | None:
        """Return the number of images at which the line is (1 + share) * limit; None unless limit and slope are > 0."""
        if self.limit <= 0.0 or self.slope <= 0.0:
            return None
        return int(np.ceil(round(self.slope / (share * self.limit), 6)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSize:
    """Points of ascending numbers of images, and the smallest number that is enough.

    `sufficient` is the smallest number from which on the upper bound of every error is at most 1 + `within` times the
    error of the largest number. It is None if no smaller number is enough: then more images may help. At
    `images_by_fit` images the fitted line is within that share of its limit. `judged_by` names the error that decides,
    and `fit_of` the one that the line is fitted to: relative_error or held_out.
    """

    points: tuple[ImagesPoint, ...]
    within: float
    sufficient: int | None
    judged_by: str = "relative_error"
    fit_of: str
    fit: SizeFit
    images_by_fit: int | None

    def as_json(self) -> dict[str, Any]:
        return {"kind": SIZE_KIND, "version": 1, "sentence": self.sentence, **asdict(self)}

    @property
    def sentence(self) -> str:
        largest = self.points[-1].images
        if self.sufficient is None:
            hint = "" if self.images_by_fit is None else f"; the fitted curve asks for about {self.images_by_fit:,}"
            return f"{largest:,} images are not shown to be enough: fewer are more than {self.within:.0%} worse{hint}"
        return f"{self.sufficient:,} images are enough: no more than {self.within:.0%} worse than {largest:,}"


def sum_losses(reports: Sequence[SiteReport]) -> tuple[float, float | None]:
    """Return the lost shares of variance, summed over sites: on the images of the fit, and on held-out ones, if any."""
    fitted = sum(each.error / each.energy for each in reports if each.energy > 0.0)
    judged = [each.held_out for each in reports if each.held_out is not None]
    if not judged:
        return fitted, None
    return fitted, sum(each.error / each.energy for each in judged if each.energy > 0.0)


def fit_losses(images: Sequence[int], losses: Sequence[float]) -> SizeFit:
    """Fit a line through the losses over 1 / images by least squares."""
    inverse, loss = 1.0 / np.asarray(images, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    slope, limit = np.polyfit(inverse, loss, 1)
    away = np.abs(limit + slope * inverse - loss) / np.maximum(np.abs(loss), np.finfo(np.float64).tiny)
    return SizeFit(limit=float(limit), slope=float(slope), residual=float(away.max()))


def compare_errors(errors_N: Floats, largest_N: Floats) -> tuple[float, float, float]:
    """Return the ratio of the means of both errors, and the low and high end of its paired 95 % bootstrap interval."""
    mean, largest = float(errors_N.mean()), float(largest_N.mean())
    if not largest > 0.0:
        ratio = math.inf if mean > 0.0 else 1.0
        return ratio, ratio, ratio
    picks = np.random.default_rng(SEED).integers(len(errors_N), size=(DRAWS, len(errors_N)))
    below = largest_N[picks].mean(1)
    drawn = errors_N[picks].mean(1)[below > 0.0] / below[below > 0.0]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return mean / largest, float(low), float(high)


def find_sufficient(points: Sequence[ImagesPoint], within: float) -> int | None:
    """Return the smallest number of images, the largest apart, from which `high` is at most 1 + `within`, or None."""
    enough = None
    for point in reversed(points[:-1]):
        if point.high > 1.0 + within:
            break
        enough = point.images
    return enough


def measure_calibration_size(
    model: nn.Module,
    every: Sequence[Moments],
    method: Method,
    *,
    widths: Widths | None = None,
    held_out: Moments | None,
    scored: ScoredInputs,
    calibration: InputSet | None = None,
    on_progress: Callable[[int], None] = lambda judged: None,
) -> CalibrationSize:
    """Compute the curve of error against the number of calibration images, by a reduction from each of the moments.

    The moments are those of one model on ascending numbers of images. Widths are uniform unless `widths` gives them by
    site. Inputs with the dense outputs (`scored`) judge, and `held_out` moments judge every site; no calibration image
    may be among either. Methods that merge channels need the `calibration` images. `on_progress` receives the number of
    judged reductions. Raises BadInput if the numbers of images don't ascend, or `reduce` refuses.
    """
    counts = [each.images for each in every]
    if len(counts) < 2 or any(one >= other for one, other in pairwise(counts)):
        raise BadInput(
            f"moments of {', '.join(map(str, counts)) or 'no'} images: expected two files or more with ascending "
            "numbers of images, such as calibrate --snapshots 100,500 writes"
        )
    losses, judged = [], list[_Judged]()
    for number, moments in enumerate(every, start=1):
        reduction = reduce(model, moments, method, widths=widths, held_out=held_out, images=calibration)
        losses.append(sum_losses(reduction.sites))
        answers = scored.answers(reduction.model)
        of_ports = zip(scored.ports, scored.dense, answers, strict=True)
        errors = [measure_relative_errors(dense, answer, role=port.role) for port, dense, answer in of_ports]
        judged.append((errors, worst_agreement(scored.scores(answers))))
        on_progress(number)
    return _concluded(counts, losses, judged)


def _concluded(
    images: Sequence[int], losses: Sequence[tuple[float, float | None]], judged: Sequence[_Judged]
) -> CalibrationSize:
    worst = int(np.argmax([errors.mean() for errors in judged[-1][0]]))
    errors = [of_outputs[worst] for of_outputs, _ in judged]
    points = []
    for count, (fitted, held_out), own, (_, agreement) in zip(images, losses, errors, judged, strict=True):
        ratio, low, high = compare_errors(own, errors[-1])
        points.append(
            ImagesPoint(
                images=count,
                fitted=fitted,
                held_out=held_out,
                relative_error=float(own.mean()),
                agreement=agreement,
                over_largest=ratio,
                low=low,
                high=high,
            )
        )
    by_sites = losses[0][1] is not None
    curve = [loss for _, loss in losses if loss is not None] if by_sites else [float(each.mean()) for each in errors]
    fit = fit_losses(images, curve)
    return CalibrationSize(
        points=tuple(points),
        within=WITHIN,
        sufficient=find_sufficient(points, WITHIN),
        fit_of="held_out" if by_sites else "relative_error",
        fit=fit,
        images_by_fit=fit.images_within(WITHIN),
    )
