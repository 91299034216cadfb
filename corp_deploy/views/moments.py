"""Moments on the terminal, and the redundancy that they tell as tables and as a plot."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from calib.redundancy import ChannelRedundancy, HeadRedundancy
from corp_deploy.reduction.overfitting import Overfitting
from perf.report.plots import Series, curve
from perf.stats.stats import Interval, exact

Entry = ChannelRedundancy | HeadRedundancy


def redundancy_tables(entries: Sequence[Entry]) -> list[Table]:
    """The paper's Table 9 for linear layers, as MLPs have them, the same for convolutions and for Q/K (largest head);
    none of what the model hasn't.
    """
    columns = ("site", "dim", "effective rank", "ratio", "k95", "ratio", "activation sparsity")
    channels = {"mlp": Table(*columns, title="Linear layers"), "convolution": Table(*columns, title="Convolutions")}
    heads = Table("site", "head dim", "effective rank", "95 % of logit energy", "99 %", title="Q/K, largest head")
    for entry in entries:
        if isinstance(entry, ChannelRedundancy):
            rank = f"{entry.effective_rank:.1f}", f"{entry.effective_rank_ratio:.3f}"
            k95_texts = str(entry.k95), f"{entry.k95_ratio:.3f}", f"{entry.activation_sparsity:.2f}"
            channels[entry.kind].add_row(entry.site, str(entry.dim), *rank, *k95_texts)
        else:
            rank_of_heads = f"{max(entry.effective_rank):.1f}"
            heads.add_row(entry.site, str(entry.dim), rank_of_heads, str(max(entry.k95)), str(max(entry.k99)))
    return [table for table in (*channels.values(), heads) if table.row_count]


def _point(entry: Entry) -> tuple[str, Interval]:
    k95 = entry.k95 if isinstance(entry, ChannelRedundancy) else max(entry.k95)
    place = ".".join(word for word in entry.site.split(".") if word.isdigit())
    return place, exact(k95 / entry.dim)


def redundancy_plot(entries: Sequence[Entry]) -> str:
    """Share of dimensions that hold 95 % of the energy, block by block, as an SVG file."""
    channels = tuple(_point(entry) for entry in entries if isinstance(entry, ChannelRedundancy))
    heads = tuple(_point(entry) for entry in entries if isinstance(entry, HeadRedundancy))
    series = [Series(name="MLP", tone="dense", points=channels), Series(name="Q/K", tone="reduced", points=heads)]
    shown = [each for each in series if each.points]
    title = "Share of dimensions that hold 95 % of the energy"
    return curve(shown, title=title, unit="share", x_label="block", log=False).standalone


def line_of_moments(summary: Mapping[str, Any], noun: str = "images") -> str:
    """A summary in one line; `noun` is what was calibrated on."""
    sites = sum(summary[kind] for kind in ("mlp_sites", "attention_sites", "convolutions"))
    size = f"{sites} sites, {summary['images']} {noun}, {summary['size_bytes'] / 1e6:.1f} MB"
    patches = summary["patches_of"]
    widths = ", ".join(map(str, summary["system_widths"]))
    covered = f"; per-image systems for head widths up to {widths}" if widths else ""
    chosen = "".join(f"; patches of {name}: {some} of {every} channels" for name, (some, every) in patches.items())
    return f"{summary['moments']}: {size}{covered}{chosen}"


def lines_of_overfitting(summary: Mapping[str, Any]) -> list[str]:
    """What MLPs cut to half lose on images of the fit and on others, and how many more would help; a line or none."""
    gap = summary.get("overfitting")
    return [] if gap is None else [Overfitting(**gap).sentence("cut to half, MLPs lose")]
