"""Figure and table of errors over the number of calibration images."""

from collections.abc import Sequence
from dataclasses import dataclass

from perf.stats.stats import exact_interval

from .numbers import NOTHING, ReportTable
from .plots import PlotSeries, draw_curve
from .svg import Drawing, Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesPoint:
    """Figures of the model reduced from the moments of a number of images.

    `fitted` and `held_out` are losses summed over sites, as shares of the dense variance. `over_largest` is the error
    divided by that with the most images, with 95 % bounds over the judged inputs.
    """

    images: int
    fitted: float
    held_out: float | None
    relative_error: float | None
    agreement: float | None
    over_largest: float
    low: float
    high: float


def draw_calibration_sizes(points: Sequence[ImagesPoint]) -> Drawing:
    """Draw losses on fitted and held-out images, or the output's error if there are no held-out images."""

    def series(name: str, tone: str, values: Sequence[float]) -> PlotSeries:
        labelled = zip(points, values, strict=True)
        return PlotSeries(
            name=name, tone=tone, points=[(f"{at.images:,}", exact_interval(value)) for at, value in labelled]
        )

    others = [at.held_out for at in points if at.held_out is not None]
    errors = [at.relative_error for at in points if at.relative_error is not None]
    if others:
        fitted = series("images of the fit", "dense", [at.fitted for at in points])
        lines = [fitted, series("others", "reduced", others)]
        title, unit = "Share of variance lost, summed over sites, against calibration images", "loss"
    else:
        lines = [series("output", "reduced", errors)]
        title, unit = "Relative error of the output against calibration images", "error"
    positive = all(point.value > 0.0 for each in lines for _, point in each.points)
    return draw_curve(lines, title=title, unit=unit, x_label="calibration images", log=positive)


def images_figure(points: Sequence[ImagesPoint]) -> Figure:
    return Figure("Where the lines meet, more images of the same kind bring nothing.", draw_calibration_sizes(points))


def images_table(points: Sequence[ImagesPoint], *, sentence: str) -> ReportTable:

    def shown(value: float | None, form: str) -> str:
        return NOTHING if value is None else format(value, form)

    rows = tuple(
        (
            f"{at.images:,}",
            f"{at.fitted:.4g}",
            shown(at.held_out, ".4g"),
            shown(at.relative_error, ".4f"),
            shown(at.agreement, ".2%"),
            f"{at.over_largest:.3f} ({at.low:.3f} to {at.high:.3f})",
        )
        for at in points
    )
    columns = ("Images", "Loss, fitted", "Loss, held out", "Output error", "Agreement", "Over the largest")
    return ReportTable(key="calibration-size", title="Calibration images", columns=columns, rows=rows, note=sentence)
