"""Latency tables of fake runners whose latency is a known function of width and batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ground.errors import Missing
from ground.feeds import Feeds, Outputs
from ground.ports import OutputPort, Port
from perf.bench.latency_table import Grid, LatencyTable, cached_table, load_table, measure_table, save_table
from perf.record.runs import Flat
from perf.timing.laps import Bound, Clock, Laps, Plan
from tests.doubles import DoubleOfRunner, FakeClock
from tests.refusals import rejects

PLAN = Plan(min_rounds=6, noise_rounds=0, warm_up_min_s=0.0)
MACHINE: Flat = {"cpu": "a cpu"}
TOKENS = Port(name="tokens", shape=(5, 4))


@dataclass
class FakeBlock(DoubleOfRunner):
    """A runner whose calls take 1 ms plus 0.01 ms per unit of width and image."""

    clock: FakeClock
    width: int
    threads: int = 1
    batch: int = 0
    inputs: tuple[Port, ...] = (TOKENS,)
    outputs: tuple[OutputPort, ...] = (OutputPort(name="out", role="feature map"),)

    def __call__(self, feeds: Feeds) -> Outputs:
        return {"out": feeds["tokens"].reshape(len(feeds["tokens"]), -1)}

    def bind(self, feeds: Feeds) -> Bound:
        assert [(name, array.shape[1:]) for name, array in feeds.items()] == [("tokens", (5, 4))]
        return replace(self, batch=len(feeds["tokens"]))

    def laps(self, calls: int, clock: Clock) -> Laps:
        ms = 1.0 + 0.01 * self.width * self.batch
        self.clock.pass_ms(calls * ms)
        return Laps(calls=calls, wall_ms=calls * ms, compute_ms=(ms,) * calls)

    def describe(self) -> Flat:
        return {"backend": "fake", "threads": self.threads}


def grid(
    clock: FakeClock, opened: Callable[[int], None] = lambda width: None, *, threads: int = 1, name: str = "mlp of 4"
) -> Grid:
    def open_width(width: int) -> FakeBlock:
        opened(width)
        return FakeBlock(clock, width, threads)

    return Grid(name=name, open_width=open_width, inputs=(TOKENS,), widths=(64, 128, 256), batches=(1, 8))


def table() -> LatencyTable:
    clock = FakeClock()
    return measure_table(grid(clock), PLAN, described=MACHINE, clock=clock)


def test_table_returns_measured_points_and_interpolates_linearly() -> None:
    measured = table()
    for width in (64, 100, 128, 200, 256):
        for batch in (1, 3, 8):
            assert measured.latency_ms(width, batch) == pytest.approx(1.0 + 0.01 * width * batch)
    assert len(measured.cells) == 6
    assert all(len(cell.samples_ms) >= 6 * 2 for cell in measured.cells)


@pytest.mark.parametrize(
    ("width", "batch", "message"), [(32, 1, "width 32"), (300, 1, "64 to 256"), (64, 16, "batch 16")]
)
def test_extrapolation_is_refused(width: int, batch: int, message: str) -> None:
    rejects(message, table().latency_ms, width, batch)


def test_cache_key_is_machine_grid_and_runner(tmp_path: Path) -> None:
    clock, opened = FakeClock(), list[int]()
    first, cached = cached_table(grid(clock, opened.append), PLAN, tmp_path / "c", described=MACHINE, clock=clock)
    assert not cached
    assert opened == [64, 64, 128, 256]
    again, cached = cached_table(grid(clock, opened.append), PLAN, tmp_path / "c", described=MACHINE, clock=clock)
    assert cached
    assert (again, opened[4:]) == (first, [64])
    others = [
        (grid(clock), {"cpu": "another cpu"}),
        (grid(clock, threads=2), MACHINE),
        (grid(clock, name="mlp of 8"), MACHINE),
        (replace(grid(clock), identity="with a norm"), MACHINE),
        (replace(grid(clock), widths=(64, 128)), MACHINE),
    ]
    for other, machine in others:
        assert not cached_table(other, PLAN, tmp_path / "c", described=machine, clock=clock)[1]
    assert len(list((tmp_path / "c").iterdir())) == 6


def test_unmeasurable_batch_writes_no_table(tmp_path: Path) -> None:
    class Full(FakeBlock):
        def bind(self, feeds: Feeds) -> Bound:
            if len(feeds["tokens"]) == 8:
                raise RuntimeError("Failed to allocate memory for requested buffer")
            return super().bind(feeds)

    clock = FakeClock()
    full = replace(grid(clock), open_width=lambda width: Full(clock, width))
    with pytest.raises(Missing, match=r"'mlp of 4' ran out of memory at batch 8.*nothing was kept"):
        cached_table(full, PLAN, tmp_path / "c", described=MACHINE, clock=clock)
    assert not (tmp_path / "c").exists()


def test_damaged_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    save_table(table(), path)
    assert load_table(path) == table()
    path.write_text('{"kind": "latency-table", "version": 2, "cells": [{}]}')
    rejects(r"t.json: cells\[0\]: the key 'width' is missing|the key 'name' is missing", load_table, path)
    rejects("don't form a grid", replace, table(), cells=table().cells[:-1])


@pytest.mark.parametrize("widths", [(), (-1, 8), (8, 8), (16, 8)])
def test_malformed_grid_is_refused(widths: tuple[int, ...]) -> None:
    rejects("must rise from 0 or more", replace, grid(FakeClock()), widths=widths)
