"""Error against the number of calibration images: the figure, from values, and its table."""

from collections.abc import Sequence
from dataclasses import dataclass

from perf.stats.stats import exact

from .numbers import Table
from .plots import Series, curve
from .svg import Drawing, Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesPoint:
    """The model reduced from the moments of so many `images`.

    `fitted` and `held_out` are losses summed over parts of sites, each a share of the part's dense variance, on the
    images of the fit and on those held out. `relative_error` and `agreement` are of the output on judged inputs; None:
    not judged. `over_largest`: this error over that of the largest number of images, by relative_error where inputs
    judge, else by held_out; `low` and `high` bound it at 95 % over judged inputs, drawn in pairs (equal to it where
    none judge).
    """

    images: int
    fitted: float
    held_out: float | None
    relative_error: float | None
    agreement: float | None
    over_largest: float
    low: float
    high: float


def images_plot(points: Sequence[ImagesPoint]) -> Drawing:
    """Losses summed over sites, on the images of the fit and on others; the output's error alone where no others."""

    def series(name: str, tone: str, values: Sequence[float]) -> Series:
        labelled = zip(points, values, strict=True)
        return Series(name=name, tone=tone, points=[(f"{at.images:,}", exact(value)) for at, value in labelled])

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
    return curve(lines, title=title, unit=unit, x_label="calibration images", log=positive)


def images_figure(points: Sequence[ImagesPoint]) -> Figure:
    """The plot with how to read it."""
    return Figure("Where the lines meet, more images of the same kind bring nothing.", images_plot(points))


def images_table(points: Sequence[ImagesPoint], *, sentence: str) -> Table:
    """One row for each number of images; the sentence says which is enough."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

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
    return Table(key="calibration-size", title="Calibration images", columns=columns, rows=rows, note=sentence)
