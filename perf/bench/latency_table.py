"""Measured latency of one block over a grid of widths and batch sizes, with interpolation between its points."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from ground.errors import BadInput, Missing, is_out_of_memory
from ground.feeds import Feeds, batch_size, feeds_of_ports, random_feeds
from ground.files import write_json
from ground.ports import Port
from ground.records import record_from_file
from perf.record.runs import Flat
from perf.runners.protocol import Runner
from perf.stats.quiet import is_disturbed, samples, throttle_reasons
from perf.stats.stats import median
from perf.timing.laps import Clock, Plan, warm_up
from perf.timing.rounds import calls_per_block, measure_rounds
from perf.timing.watch import Watch, fingerprint, unwatched

KIND, VERSION = "latency-table", 2  # version 1 had the shape of a single input
AGAIN = "remove it, so that it is measured again"
SUFFIX = ".latency-table.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Times at one width and batch size in the quiet, unthrottled rounds, and whether there were too few of them."""

    width: int
    batch: int
    samples_ms: tuple[float, ...]
    disturbed: bool

    @property
    def p50_ms(self) -> float:
        return median(self.samples_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Latencies of one block, with any name such as `mlp of 384`, on one machine by one kind of runner."""

    name: str
    fingerprint: str
    describe: Flat
    inputs: tuple[Port, ...]
    cells: tuple[Cell, ...]

    def __post_init__(self) -> None:
        if len(self.cells) != len(self.widths) * len(self.batches) or not self.cells:
            raise BadInput(
                f"latency table {self.name!r}: its {len(self.cells)} cells don't form a grid of widths and batches"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({cell.width for cell in self.cells}))

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({cell.batch for cell in self.cells}))

    def latency_ms(self, width: int, batch: int) -> float:
        """Return the latency by linear interpolation in width and batch. Raises BadInput outside the grid."""
        for what, size, sizes in (("width", width, self.widths), ("batch", batch, self.batches)):
            if not sizes[0] <= size <= sizes[-1]:
                raise BadInput(f"latency table {self.name!r}: {what} {size} lies outside {sizes[0]} to {sizes[-1]}")
        above = bisect_left(self.widths, width)
        around = self.widths[max(above - 1, 0) : above + 1]
        p50_ms = {(cell.width, cell.batch): cell.p50_ms for cell in self.cells if cell.width in around}
        rows = [[p50_ms[each, other] for other in self.batches] for each in around]
        return float(np.interp(width, around, [np.interp(batch, self.batches, row) for row in rows]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A grid to measure; `open_width(width)` makes a runner, not yet entered, of the block at that width.

    `identity` describes all else that the block's latency depends on; tables of another identity are never reused.
    """

    name: str
    identity: str = ""
    open_width: Callable[[int], Runner]
    inputs: tuple[Port, ...]
    widths: tuple[int, ...]
    batches: tuple[int, ...]

    def __post_init__(self) -> None:
        for what, sizes, least in (("widths", self.widths, 0), ("batches", self.batches, 1)):
            if not sizes or min(sizes) < least or sorted(set(sizes)) != list(sizes):
                raise BadInput(f"grid {self.name!r}: {what} must rise from {least} or more, got {list(sizes)}")


def measure_table(
    grid: Grid, plan: Plan, *, described: Flat, clock: Clock = perf_counter_ns, watch: Watch = unwatched
) -> LatencyTable:
    """Return the table of all cells on the described machine. Raises Missing if a batch size can't be measured."""
    cells: list[Cell] = []
    with ExitStack() as stack:
        runners = {width: stack.enter_context(grid.open_width(width)) for width in grid.widths}
        describe = runners[grid.widths[0]].describe()
        for batch in grid.batches:
            try:
                cells += _batch_cells(runners, random_feeds(grid.inputs, batch, seed=0), plan, clock, watch)
            except (BadInput, Missing):
                raise
            except Exception as error:
                what = "ran out of memory" if is_out_of_memory(error) else "failed"
                raise Missing(
                    f"latency table {grid.name!r} {what} at batch {batch} ({type(error).__name__}: {error}); nothing "
                    "was kept; ask for smaller batches"
                ) from error
    return LatencyTable(
        name=grid.name, fingerprint=fingerprint(described), describe=describe, inputs=grid.inputs, cells=tuple(cells)
    )


def cached_table(grid: Grid, plan: Plan, directory: Path, *, described: Flat, **how: Any) -> tuple[LatencyTable, bool]:
    """Return the table for a machine, grid and runner, measured and written if missing, and whether it was there."""
    with grid.open_width(grid.widths[0]) as runner:
        describe = runner.describe()
    key = {
        "machine": fingerprint(described),
        "name": grid.name,
        "identity": grid.identity,
        "describe": json.dumps(dict(describe), sort_keys=True),
        "inputs": repr(grid.inputs),
        "widths": repr(grid.widths),
        "batches": repr(grid.batches),
    }
    path = directory / f"{fingerprint(key, key)}{SUFFIX}"
    if path.exists():
        return load_table(path), True
    table = measure_table(grid, plan, described=described, **how)
    save_table(table, path)
    return table, False


def save_table(table: LatencyTable, path: Path) -> None:
    write_json(path, {"kind": KIND, "version": VERSION, **asdict(table)}, indent=None)


def load_table(path: Path) -> LatencyTable:
    return record_from_file(path, LatencyTable, kind=KIND, version=VERSION, remedy=AGAIN)


def _batch_cells(runners: Mapping[int, Runner], feeds: Feeds, plan: Plan, clock: Clock, watch: Watch) -> list[Cell]:
    bounds = {str(width): runner.bind(feeds_of_ports(feeds, runner.inputs)) for width, runner in runners.items()}
    call_ms = min(warm_up(bound, plan, clock).call_ms() for bound in bounds.values())
    calls = calls_per_block(call_ms, plan.block_ms)
    blocks = measure_rounds(bounds, plan.min_rounds, calls=calls, clock=clock, watch=watch)
    disturbed = is_disturbed(blocks) or bool(throttle_reasons(blocks))
    return [
        Cell(
            width=width,
            batch=batch_size(feeds),
            samples_ms=tuple(float(ms) for ms in np.concatenate(samples(blocks, str(width)))),
            disturbed=disturbed,
        )
        for width in runners
    ]
