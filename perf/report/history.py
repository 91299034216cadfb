"""Latency over releases in the report of one release: its plots, and a table of all releases."""

from collections.abc import Iterator, Sequence

from perf.stats.trend import BatchTrend, Trend

from .numbers import ReportTable, signed_percent
from .past_plots import HOW_TO_READ, draw_over_releases
from .past_releases import move_at
from .past_texts import heading_text, value_with_interval
from .svg import Drawing, Figure

TONES = ("dense", "reduced", "reduced")


def history_figures(history: Trend) -> list[Figure]:
    return [
        Figure(HOW_TO_READ if batch is history.batches[0] else "", _draw(history, batch, place))
        for batch in history.batches
        for place, series in enumerate(batch.series)
        if any(series.values)
    ]


def draw_history(history: Trend) -> Drawing:
    """Draw the judged series at the first batch size that has a figure, or else at the first one."""
    batch = next((batch for batch in history.batches if any(batch.judged.values)), history.batches[0])
    return _draw(history, batch, batch.series.index(batch.judged))


def _draw(history: Trend, batch: BatchTrend, place: int) -> Drawing:
    series = batch.series[place]
    moves = [move_at(batch.batch, series, point) for point in series.changes]
    return draw_over_releases(series, moves, history.releases, batch=batch.batch, tone=TONES[place])


def history_table(history: Trend) -> ReportTable:
    heads = [heading_text(series.name, series.unit) for batch in history.batches[:1] for series in batch.series]
    left_out = [f"{each.name} ({each.reason})" for each in history.left_out]
    return ReportTable(
        key="history",
        title="Latency over releases",
        columns=("Batch", "Release", "Measured", *heads, "Time"),
        rows=tuple(row for batch in history.batches for row in _rows(batch, history.releases)),
        note=f"{history.test}." + (f" Left out: {'; '.join(left_out)}." if left_out else ""),
        is_folded=True,
    )


def _rows(batch: BatchTrend, releases: Sequence[str]) -> Iterator[tuple[str, ...]]:
    moved = {change.first: signed_percent(change.ratio.value - 1) for change in batch.judged.changes}
    for place, name in enumerate(releases):
        cells = (value_with_interval(series.values[place], series.unit) for series in batch.series)
        yield (str(batch.batch), str(place + 1), name, *cells, moved.get(place, ""))
