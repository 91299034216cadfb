"""A sweep as a table, as CSV, and as a plot of error against MACs."""

import csv
import io
from collections.abc import Sequence
from dataclasses import fields

from rich.table import Table

from corp_deploy.planning.sweep import SweepPoint
from perf.report.plots import Spot, scatter

LEAST_ERROR = 1e-6


def sweep_table(trials: Sequence[SweepPoint]) -> Table:
    """One row a trial; the front of least error at least MACs is starred. Columns of sites are those that any trial
    narrows, MLPs and attention where budgets alone say.
    """
    several = [f"error of {score.name}" for trial in trials[:1] for score in trial.outputs]
    conv = any(trial.conv_sparsity for trial in trials)
    linear = not conv or any(trial.mlp_sparsity or trial.attention_sparsity for trial in trials)
    sites = ["MLP", "Q/K"] * linear + ["conv"] * conv
    names = "preset", *sites, "budget", *["heads"] * linear, "MACs", "parameters", "relative error"
    table = Table(*names, *several, "agreement", "accuracy", "")
    for trial in trials:
        table.add_row(
            trial.preset,
            *[f"{trial.mlp_sparsity:g}", f"{trial.attention_sparsity:g}"] * linear,
            *[f"{trial.conv_sparsity:g}"] * conv,
            "-" if trial.budget is None else f"{trial.budget:g}",
            *[trial.geometry] * linear,
            f"{trial.macs_share:.1%}",
            f"{trial.parameters:,}",
            f"{trial.relative_error:.4f}",
            *(f"{score.relative_error:.4f}" for score in trial.outputs),
            "-" if trial.agreement is None else f"{trial.agreement:.2%}",
            "-" if trial.accuracy is None else f"{trial.accuracy:.2%}",
            "*" if trial.on_front else "",
        )
    return table


def csv_of_sweep(trials: Sequence[SweepPoint]) -> str:
    """All figures, unrounded."""
    out = io.StringIO()
    names = [field.name for field in fields(SweepPoint) if field.name != "outputs"]
    several = [f"relative_error {score.name}" for trial in trials[:1] for score in trial.outputs]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *several])
    for trial in trials:
        errors = [score.relative_error for score in trial.outputs]
        writer.writerow([*(getattr(trial, name) for name in names), *errors])
    return out.getvalue()


def sweep_plot(trials: Sequence[SweepPoint]) -> str:
    """Relative logit error (logarithmic) against the share of MACs that stays, as an SVG file; the front is filled."""
    clouds: dict[str, list[Spot]] = {}
    for trial in trials:
        tip = f"{trial.preset}: {trial.macs_share:.1%} of the MACs, error {trial.relative_error:.4f}"
        spot = Spot(across=trial.macs_share, value=trial.relative_error, filled=trial.on_front, tip=tip)
        clouds.setdefault(trial.preset, []).append(spot)
    title = "Relative logit error against the share of MACs kept"
    return scatter(clouds, title=title, unit="error", across="share of the MACs kept", least=LEAST_ERROR).standalone
