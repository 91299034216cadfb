"""What a reduction did, as tables for people."""

from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.table import Table

from corp_deploy.families.inspection import merging_record
from corp_deploy.planning.request import ProbedAllocation, WidthPlan
from corp_deploy.polish.parts import Progress
from corp_deploy.reduction.model import Reduction
from corp_deploy.reduction.report import SiteReport

Cell = Callable[[SiteReport], str]


def _share(error: float, energy: float | None) -> str:
    return f"{100.0 * error / (energy or 1.0):.2g}%"


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
    """Per part: width asked and got, and the share of the dense signal lost without the repair, with it and, where
    that was judged, on held-out images; after the closed loop, what the residual stream lacks too.
    """
    judged = HELD_OUT if any(site.held_out for site in sites) else ()
    looped = STREAM if any(site.loop for site in sites) else ()
    columns = (*COLUMNS, *judged, *looped)
    table = Table()
    for name, _ in columns:
        table.add_column(name, no_wrap=name == "site")
    for site in sites:
        table.add_row(*(cell(site) for _, cell in columns))
    return table


def ways_table(ways: Sequence[ProbedAllocation]) -> Table:
    """The ways to spend a budget side by side."""
    table = Table("widths", "of the dense cost", "logit error predicted", "found on calibration images")
    for way in ways:
        table.add_row(way.name, f"{way.share:.1%}", f"{way.predicted_error:.4f}", f"{way.measured_error:.4f}")
    return table


def reduction_shown(reduction: Reduction, plan: WidthPlan) -> list[RenderableType]:
    """The sites, the ways that were weighed where there were any, and a sentence on each thing that was decided."""
    ways, merging = [ways_table(plan.ways)] if plan.ways else [], merging_record(reduction.model)
    merged = merging.sentences() if merging is not None else ()
    return [site_table(reduction.sites), *ways, *plan.decisions, *reduction.decisions, *merged]


def polishing_shown(progress: Progress) -> tuple[str, int, int, str]:
    """A polish under way: what is at work, how far it is, of how much, in which unit."""
    errors = f"held-out error {progress.error:.4f} from {progress.error_before:.4f}"
    return f"polishing {progress.part}, {errors}", round(100.0 * progress.share), 100, "%"


def speedup_line(predicted: float, measured: float) -> str:
    """A predicted speed-up beside the one that was measured."""
    return f"speed-up predicted {predicted:.3f}, measured {measured:.3f}: {predicted / measured - 1.0:+.1%} off"
