"""A sweep as a table, as CSV, and as a plot of error against MACs."""

from collections.abc import Sequence
from dataclasses import fields

from rich.table import Table

from corp_deploy.planning.sweep_points import EngineFigures, SpeedAtBatch, SweepPoint, batches_of
from ground.quantity import format_number
from ground.text import csv_text
from perf.report.plots import Spot, draw_scatter
from perf.stats.stats import Interval

LEAST_ERROR = 1e-6
NESTED = ("outputs", "speeds", "engine", "knobs", "effort", "fronts")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _figures(speed: SpeedAtBatch | None) -> tuple[str, str]:
    if speed is None or speed.p50_ms is None:
        return "-", "-" if speed is None else speed.message or "-"
    gain = speed.speedup
    speedup = "-" if gain is None else gain.describe(bounds=" ({}-{})")
    return format_number(speed.p50_ms.value, 3), speedup + " disturbed" * speed.disturbed


def sweep_table(trials: Sequence[SweepPoint]) -> Table:
    """Return a table with a row for each trial; stars mark the Pareto front of error and MACs.

    A kind of sites has a column if a trial sets its sparsity; without convolutions, MLPs and attention always have one.
    """
    several = [f"error of {score.name}" for trial in trials[:1] for score in trial.outputs]
    conv = any(trial.conv_sparsity for trial in trials)
    linear = not conv or any(trial.mlp_sparsity or trial.attention_sparsity for trial in trials)
    sites = ["MLP", "Q/K"] * linear + ["conv"] * conv
    counts = len({trial.images for trial in trials}) > 1
    top5 = any(trial.top5 is not None for trial in trials)
    names = ("preset", *["images"] * counts, *sites, "budget", *["heads"] * linear, "MACs", "parameters")
    table = Table(*names, "relative error", *several, "agreement", "accuracy", *["Top-5"] * top5, "")
    for trial in trials:
        knobs = "".join(f"\n{name} {how}" for name, how in trial.knobs.items())
        table.add_row(
            trial.preset + knobs,
            *[f"{trial.images}"] * counts,
            *[f"{trial.mlp_sparsity:g}", f"{trial.attention_sparsity:g}"] * linear,
            *[f"{trial.conv_sparsity:g}"] * conv,
            "-" if trial.budget is None else f"{trial.budget:g}",
            *[trial.geometry] * linear,
            f"{trial.macs_share:.1%}",
            f"{trial.parameters:,}",
            f"{trial.relative_error:.4f}",
            *(f"{score.relative_error:.4f}" for score in trial.outputs),
            _share(trial.agreement),
            _share(trial.accuracy),
            *[_share(trial.top5)] * top5,
            "*" if trial.on_front else "",
        )
    return table


def lines_of_gaps(trials: Sequence[SweepPoint]) -> list[str]:
    return [
        f"{trial.describe}: sites lose {trial.gap[0]:.1%} of their output on images of the fit, {trial.gap[1]:.1%} on "
        "others"
        for trial in trials
        if trial.gap is not None
    ]


def sweep_speeds(trials: Sequence[SweepPoint]) -> Table | None:
    """Return a table of each trial's latency and speed-up, and of its engine; None without either.

    A star marks a trial on the Pareto front of speed-up and disagreement at a batch size, see mark_fronts.
    """
    batches, engines = batches_of(trials), any(trial.engine for trial in trials)
    if not batches and not engines:
        return None
    timed = [name for batch in batches for name in (f"p50 ms b{batch}", f"speed-up b{batch}", "")]
    table = Table("trial", *timed, *["engine MB", "fused"] * engines)
    for trial in trials:
        figures: list[str] = []
        for batch in batches:
            figures += [*_figures(trial.speed_at(batch)), "*" if batch in trial.fronts else ""]
        engine = trial.engine
        built = ["-", "-"] if engine is None else [f"{engine.plan_bytes / 1e6:.1f}", fused_of(engine)]
        table.add_row(trial.describe, *figures, *(built if engines else ()))
    return table


def fused_of(engine: EngineFigures) -> str:
    return "-" if engine.fused_attention is None else f"{engine.fused_attention} of {engine.attention_sites}"


def _at(speed: SpeedAtBatch | None, name: str, batch: int) -> dict[str, object]:
    figure: Interval | None = None if speed is None else getattr(speed, name)
    values = (None, None, None) if figure is None else figure.figures
    return {f"{name}{end}@b{batch}": value for end, value in zip(("", "_low", "_high"), values, strict=True)}


def _row(trial: SweepPoint, batches: Sequence[int]) -> dict[str, object]:
    row: dict[str, object] = {
        each.name: getattr(trial, each.name) for each in fields(SweepPoint) if each.name not in NESTED
    }
    row |= {name: trial.knobs.get(name) for name in ("select", "repair", "qk")}
    row |= {f"relative_error {score.name}": score.relative_error for score in trial.outputs}
    for batch in batches:
        speed = trial.speed_at(batch)
        row |= _at(speed, "p50_ms", batch)
        row[f"p90_ms@b{batch}"] = None if speed is None else speed.p90_ms
        for name in ("images_per_s", "dense_p50_ms", "speedup"):
            row |= _at(speed, name, batch)
        row[f"disturbed@b{batch}"] = None if speed is None else speed.disturbed
        row[f"on_front@b{batch}"] = batch in trial.fronts
    if trial.engine is not None:
        row |= {"plan_bytes": trial.engine.plan_bytes, "fused_attention": trial.engine.fused_attention}
    for name, effort in trial.effort.items():
        row |= {f"seconds_{name}": effort.seconds, f"peak_bytes_{name}": effort.peak_bytes}
    return row


def csv_of_sweep(trials: Sequence[SweepPoint]) -> str:
    rows = [_row(trial, batches_of(trials)) for trial in trials]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text((names, *(map(row.get, names) for row in rows)))


def sweep_plot(trials: Sequence[SweepPoint]) -> str:
    """Draw the relative error (logarithmic) against the share of MACs as SVG; spots of the Pareto front are filled."""
    clouds: dict[str, list[Spot]] = {}
    for trial in trials:
        tip = f"{trial.describe}: {trial.macs_share:.1%} of the MACs, error {trial.relative_error:.4f}"
        spot = Spot(x=trial.macs_share, value=trial.relative_error, filled=trial.on_front, tip=tip)
        clouds.setdefault(trial.preset, []).append(spot)
    title = "Relative logit error against the share of MACs kept"
    return draw_scatter(
        clouds, title=title, unit="error", x_label="share of the MACs kept", least=LEAST_ERROR
    ).standalone
