"""Views of moments, of the redundancy that they show, and of a reduction and its polish."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from calib.redundancy import ChannelRedundancy, HeadRedundancy
from corp_deploy.families.inspection import merging_record
from corp_deploy.planning.request import WidthPlan
from corp_deploy.polish.polish import PolishProgress
from corp_deploy.reduction.model import Reduction
from corp_deploy.reduction.overfitting import Overfitting
from corp_deploy.reduction.report import SiteReport
from perf.report.plots import PlotSeries, draw_curve
from perf.stats.stats import Interval, exact_interval

Cell = Callable[[SiteReport], str]


def _share(error: float, energy: float | None) -> str:
    share = 100.0 * error / (energy or 1.0)
    return f"{share:.0f}%" if share >= 99.5 else f"{share:.2g}%"


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("site", lambda site: site.site),
    ("part", lambda site: site.part),
    ("dense", lambda site: str(site.width_dense)),
    ("asked", lambda site: f"{site.width_asked:g}"),
    ("got", lambda site: str(site.width)),
    ("lost without repair", lambda site: f"{site.error_uncompensated / (site.energy or 1.0):.2%}"),
    ("lost", lambda site: _share(site.error, site.energy)),
)
HELD_OUT: tuple[tuple[str, Cell], ...] = (
    ("lost, held out", lambda site: _share(site.held_out.error, site.held_out.energy) if site.held_out else ""),
)
STREAM: tuple[tuple[str, Cell], ...] = (
    ("stream lost", lambda site: _share(site.loop.error, site.loop.energy) if site.loop else ""),
    ("stream lost, held out", lambda site: _share(site.loop.error_held_out, site.loop.energy) if site.loop else ""),
)


def site_table(sites: Sequence[SiteReport]) -> Table:
    """Return the table of sites: widths and lost shares of the dense signal, held out and of the stream if measured."""
    judged = HELD_OUT if any(site.held_out for site in sites) else ()
    looped = STREAM if any(site.loop for site in sites) else ()
    columns = (*COLUMNS, *judged, *looped)
    table = Table()
    for name, _ in columns:
        table.add_column(name, no_wrap=name == "site")
    for site in sites:
        table.add_row(*(cell(site) for _, cell in columns))
    return table


def reduction_shown(reduction: Reduction, plan: WidthPlan) -> list[RenderableType]:
    merging = merging_record(reduction.model)
    merged = merging.sentences() if merging is not None else ()
    ways = Table("widths", "of the dense cost", "logit error predicted", "found on calibration images", "median image")
    for way in plan.ways:
        errors = (way.predicted_error, way.measured_error, way.median_error)
        ways.add_row(way.name, f"{way.share:.1%}", *(f"{error:.4f}" for error in errors))
    weighed = [ways] if plan.ways else []
    return [site_table(reduction.sites), *weighed, *plan.decisions, *reduction.decisions, *merged]


def polishing_shown(progress: PolishProgress) -> tuple[str, int, int, str]:
    """Return title, count, total and unit of a progress bar for a polish, in percent."""
    errors = f"held-out error {progress.error:.4f} from {progress.error_before:.4f}"
    return f"polishing {progress.part}, {errors}", round(100.0 * progress.share), 100, "%"


Entry = ChannelRedundancy | HeadRedundancy


def redundancy_tables(entries: Sequence[Entry]) -> list[Table]:
    """Return tables of effective ranks and energies of MLPs, convolutions, and Q/K of each site's largest head.

    They are in the form of Table 9 of CORP's paper. A kind of sites that the model lacks has no table.
    """
    columns = ("site", "dim", "effective rank", "ratio", "k95", "ratio", "activation sparsity")
    channels = {"mlp": Table(*columns, title="Linear layers"), "convolution": Table(*columns, title="Convolutions")}
    heads = Table("site", "head dim", "effective rank", "95 % of logit energy", "99 %", title="Q/K, largest head")
    for entry in entries:
        if isinstance(entry, ChannelRedundancy):
            rank = f"{entry.effective_rank:.1f}", f"{entry.effective_rank_ratio:.3f}"
            k95_texts = str(entry.k95), f"{entry.k95_ratio:.3f}", f"{entry.activation_sparsity:.2f}"
            channels[entry.type].add_row(entry.site, str(entry.dim), *rank, *k95_texts)
        else:
            rank_of_heads = f"{max(entry.effective_rank):.1f}"
            heads.add_row(entry.site, str(entry.dim), rank_of_heads, str(max(entry.k95)), str(max(entry.k99)))
    return [table for table in (*channels.values(), heads) if table.row_count]


def _point(entry: Entry) -> tuple[str, Interval]:
    k95 = entry.k95 if isinstance(entry, ChannelRedundancy) else max(entry.k95)
    place = ".".join(word for word in entry.site.split(".") if word.isdigit())
    return place, exact_interval(k95 / entry.dim)


def redundancy_plot(entries: Sequence[Entry]) -> str:
    """Draw the share of dimensions that hold 95 % of the energy, site by site, as SVG."""
    channels = tuple(_point(entry) for entry in entries if isinstance(entry, ChannelRedundancy))
    heads = tuple(_point(entry) for entry in entries if isinstance(entry, HeadRedundancy))
    series = [
        PlotSeries(name="MLP", tone="dense", points=channels),
        PlotSeries(name="Q/K", tone="reduced", points=heads),
    ]
    shown = [each for each in series if each.points]
    title = "Share of dimensions that hold 95 % of the energy"
    return draw_curve(shown, title=title, unit="share", x_label="block", log=False).standalone


def line_of_moments(summary: Mapping[str, Any], noun: str = "images") -> str:
    sites = sum(summary[kind] for kind in ("mlp_sites", "attention_sites", "convolutions"))
    size = f"{sites} sites, {summary['images']} {noun}, {summary['size_bytes'] / 1e6:.1f} MB"
    patches = summary["patches_of"]
    widths = ", ".join(map(str, summary["system_widths"]))
    covered = f"; per-image systems for head widths up to {widths}" if widths else ""
    chosen = "".join(f"; patches of {name}: {some} of {every} channels" for name, (some, every) in patches.items())
    return f"{summary['moments']}: {size}{covered}{chosen}"


def lines_of_pictures(summary: Mapping[str, Any]) -> list[str]:
    """Return the advice on the number of pictures and the line on groups that were found, as far as there are any."""
    found, advice = summary.get("groups"), summary.get("advice")
    lines = [] if advice is None else [advice]
    if found is not None:
        lines.append(
            f"{found['count']} groups of images belong together by {found['found_by']}: reduce measures what widths "
            "lose on whole groups that it sets apart (--groups none: on any images)"
        )
    return lines


def lines_of_overfitting(summary: Mapping[str, Any]) -> list[str]:
    gap = summary.get("overfitting")
    return [] if gap is None else [Overfitting(**gap).sentence("cut to half, MLPs lose")]
