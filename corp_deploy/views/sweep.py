"""A sweep as a table, as CSV, and as a plot of error against MACs."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from html import escape

from rich.table import Table

from corp_deploy.planning.sweep import SweepPoint
from perf.report.scales import linear, logarithmic, short
from perf.report.svg import MARKS, PALETTE, WIDTH

HUES = ("#0f6fde", "#c0262d", "#137a4b", "#9a6200", "#7a4bc2", "#0e8a94", "#8793a3")
HEIGHT, LEFT, TOP, BOTTOM = 320, 52, 46, 268


def sweep_table(trials: Sequence[SweepPoint]) -> Table:
    """One row a trial; the front of least error at least MACs is starred."""
    table = Table(
        "preset", "MLP", "Q/K", "budget", "heads", "MACs", "parameters", "relative error", "agreement", "accuracy", ""
    )
    for trial in trials:
        table.add_row(
            trial.preset,
            f"{trial.mlp_sparsity:g}",
            f"{trial.attention_sparsity:g}",
            "-" if trial.budget is None else f"{trial.budget:g}",
            trial.geometry,
            f"{trial.macs_share:.1%}",
            f"{trial.parameters:,}",
            f"{trial.relative_error:.4f}",
            f"{trial.agreement:.2%}",
            "-" if trial.accuracy is None else f"{trial.accuracy:.2%}",
            "*" if trial.on_front else "",
        )
    return table


def csv_of_sweep(trials: Sequence[SweepPoint]) -> str:
    """All figures, unrounded."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(SweepPoint)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(trial) for trial in trials)
    return out.getvalue()


def sweep_plot(trials: Sequence[SweepPoint]) -> str:
    """Relative logit error (logarithmic) against the share of MACs that stays; front trials are filled."""
    right = WIDTH - 14
    x = linear([trial.macs_share for trial in trials], start=LEFT, end=right, zero=False)
    y = logarithmic([trial.relative_error for trial in trials], start=BOTTOM, end=TOP, least=1e-6)
    presets = list(dict.fromkeys(trial.preset for trial in trials))
    hue = {preset: HUES[place % len(HUES)] for place, preset in enumerate(presets)}
    body = ['<rect width="100%" height="100%" fill="var(--page)"/>']
    for tick in y.ticks:
        level = y.at(tick)
        body.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}"/>')
        body.append(f'<text x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x.ticks:
        body.append(f'<text x="{x.at(tick):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{short(tick)}</text>')
    body.append(f'<text x="{(LEFT + right) / 2}" y="{BOTTOM + 38}" text-anchor="middle">share of the MACs kept</text>')
    for place, preset in enumerate(presets):
        at = LEFT + place * 78
        body.append(f'<circle cx="{at}" cy="22" r="4" fill="{hue[preset]}"/>')
        body.append(f'<text class="name" x="{at + 8}" y="26">{escape(preset)}</text>')
    body += [_mark(trial, x.at(trial.macs_share), y.at(max(trial.relative_error, 1e-6)), hue) for trial in trials]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    title = "<title>Relative logit error against the share of MACs kept</title>"
    return f"{head}{title}<style>{PALETTE}{MARKS}</style>{''.join(body)}</svg>\n"


def _mark(trial: SweepPoint, x: float, y: float, hue: dict[str, str]) -> str:
    colour = hue[trial.preset]
    fill = colour if trial.on_front else "var(--page)"
    words = f"{trial.preset}: {trial.macs_share:.1%} of the MACs, error {trial.relative_error:.4f}"
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="4.5"'
    return f'<circle {place} fill="{fill}" stroke="{colour}"><title>{escape(words)}</title></circle>'
