"""A sweep as a self-contained HTML page: plots against latency and MACs, and tables of trials, speeds and engines."""

from collections.abc import Callable, Sequence

from corp_deploy.planning.calibration_size import CalibrationSize
from corp_deploy.planning.sweep_points import DensePoint, SweepPoint, batches_of, describe_sweep
from ground.quantity import format_number
from perf.record.runs import FittedInputs
from perf.report.curves import images_figure, images_table
from perf.report.numbers import NOTHING, ReportTable, percent_text
from perf.report.page import Remark, Section, html_from_sections
from perf.report.plots import Spot, draw_scatter
from perf.report.svg import Figure
from perf.stats.stats import Interval

from .sweep import fused_of

LEAST = 1e-5
HOLLOW = "Hollow spots are beaten by another trial in both."
Across = Callable[[SweepPoint], float | None]
Front = Callable[[SweepPoint], bool]


def _figure(
    points: Sequence[SweepPoint], what: str, across: tuple[str, Across], unit: str, value: Across, filled: Front
) -> Figure | None:
    """Draw the trials that have values on both axes; return None for fewer than two."""
    clouds: dict[str, list[Spot]] = {}
    name, place = across
    for point in points:
        x, y = place(point), value(point)
        if x is None or y is None:
            continue
        tip = f"{point.describe}: {name} {format_number(x, 4)}, {unit} {format_number(y, 4)}"
        cloud = clouds.setdefault(" ".join([point.preset, *point.knobs.values()]), [])
        cloud.append(Spot(x=x, value=y, filled=filled(point), tip=tip))
    if sum(map(len, clouds.values())) < 2:
        return None
    title = f"{unit[0].upper()}{unit[1:]} against {what}"
    return Figure(caption=HOLLOW, drawing=draw_scatter(clouds, title=title, unit=unit, x_label=name, least=LEAST))


def _against(points: Sequence[SweepPoint], what: str, across: tuple[str, Across], filled: Front) -> list[Figure]:
    values: dict[str, Across] = {
        "error": lambda point: point.relative_error,
        "share that disagrees": lambda point: None if point.agreement is None else 1.0 - point.agreement,
    }
    figures = (_figure(points, what, across, unit, value, filled) for unit, value in values.items())
    return [figure for figure in figures if figure is not None]


def _against_latency(points: Sequence[SweepPoint], batch: int) -> list[Figure]:
    def p50(point: SweepPoint) -> float | None:
        speed = point.speed_at(batch)
        return None if speed is None or speed.p50_ms is None else speed.p50_ms.value

    across = (f"p50 at batch {batch}, ms", p50)
    return _against(points, f"latency, batch {batch}", across, lambda point: batch in point.fronts)


def _range(figure: Interval | None, digits: int) -> str:
    return NOTHING if figure is None else figure.describe(f".{digits}f", bounds="\n{} to {}")


def trials_table(points: Sequence[SweepPoint]) -> ReportTable:
    labelled = any(point.accuracy is not None for point in points)
    columns = ("Model", "Images", "MACs", "Parameters", "Error", "Agreement", *(("Top-1", "Top-5") if labelled else ()))
    rows = tuple(
        (
            point.describe,
            NOTHING if point.images is None else str(point.images),
            f"{100 * point.macs_share:.1f} %",
            f"{point.parameters:,}",
            f"{point.relative_error:.4f}",
            percent_text(point.agreement),
            *((percent_text(point.accuracy), percent_text(point.top5)) if labelled else ()),
        )
        for point in points
    )
    return ReportTable(key="trials", title="All trials", columns=columns, rows=rows)


def trial_speeds(points: Sequence[SweepPoint], batch: int) -> ReportTable:
    rows = []
    for point in points:
        if (speed := point.speed_at(batch)) is None:
            continue
        rows.append(
            (
                point.describe,
                _range(speed.p50_ms, 3),
                NOTHING if speed.p90_ms is None else f"{speed.p90_ms:.3f}",
                _range(speed.images_per_s, 1),
                _range(speed.dense_p50_ms, 3),
                _range(speed.speedup, 3),
                _range(speed.noise, 3),
                "front" if batch in point.fronts else "disturbed" if speed.disturbed else "",
            )
        )
    columns = ("Model", "p50, ms", "p90, ms", "Images/s", "Dense p50, ms", "Speed-up", "Dense over itself", "")
    return ReportTable(key=f"speed-b{batch}", title=f"Batch {batch}", columns=columns, rows=tuple(rows))


def engines_table(points: Sequence[SweepPoint]) -> ReportTable | None:
    built = [(point, point.engine) for point in points if point.engine is not None]
    rows = tuple(
        (
            point.describe,
            engine.backend,
            ", ".join(engine.targets) or "portable",
            f"{engine.plan_bytes / 1e6:.2f}",
            NOTHING if engine.kernels is None else str(engine.kernels),
            fused_of(engine),
        )
        for point, engine in built
    )
    columns = ("Model", "Builder", "Targets", "Size, MB", "Kernels", "Fused attention")
    return ReportTable(key="engines", title="Engines", columns=columns, rows=rows) if rows else None


def _as_sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def sweep_page(
    points: Sequence[SweepPoint],
    dense: DensePoint,
    *,
    title: str,
    size: CalibrationSize | None = None,
    fitted: FittedInputs | None = None,
) -> str:
    """Return the HTML; `size`: the calibration images that are enough; `fitted`: judging inputs that were fitted to."""
    remarks = (
        () if fitted is None or not fitted.has_overlap else (Remark(text=_as_sentence(fitted.warning), warns=True),)
    )
    batches, kept = batches_of(points), ("share of the MACs kept", lambda point: point.macs_share)
    sections = [
        Section(
            title="Speed and fidelity",
            remarks=(Remark(text="Time is paired: the front is of speed-ups, each measured beside the dense model."),),
            figures=tuple(figure for batch in batches for figure in _against_latency(points, batch)),
            tables=tuple(trial_speeds(points, batch) for batch in batches),
        )
    ] * bool(batches)
    sections.append(
        Section(
            title="Size and fidelity",
            remarks=(Remark(text=_as_sentence(describe_sweep(points))), *remarks),
            figures=tuple(_against(points, "MACs", kept, lambda point: point.on_front)),
            tables=(trials_table(points),),
        )
    )
    if (engines := engines_table(points)) is not None:
        sections.append(Section(title="Engines", tables=(engines,)))
    if size is not None:
        sections.append(
            Section(
                title="Calibration images",
                remarks=(Remark(text=_as_sentence(size.sentence)),),
                figures=(images_figure(size.points),),
                tables=(images_table(size.points, sentence=""),),
            )
        )
    right = "" if dense.accuracy is None else f", Top-1 {percent_text(dense.accuracy)}"
    lead = (
        f"{len(points)} models beside the dense one ({dense.macs:,} MACs, {dense.parameters:,} parameters{right}), "
        f"judged on {dense.inputs:,} inputs."
    )
    return html_from_sections(title, sections, lead=lead)
