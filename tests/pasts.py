"""Releases with planted times, sizes and drivers, for tests of the report of releases over time."""

from dataclasses import replace
from typing import Any

from perf.record.runs import Bench
from perf.report.past_releases import Line, PastReleases
from tests.histories import bench_of_release
from tests.pages import ROOT

DRIVERS = ("550.54", "560.35")
GOLDEN = ROOT / "tests" / "golden" / "files" / "release"


def bench_of(day: int, ms: float, *, size: int | None = 1000, driver: str = DRIVERS[0], **how: Any) -> Bench:
    """Make the record of a release with a candidate of this size, measured with this driver."""
    environment = {"cpu": how.pop("cpu", "one"), "driver": driver, "load_average": float(day)}
    bench = bench_of_release(day, ms, environment=environment, **how)
    return replace(bench, subjects=(bench.reference, replace(bench.candidate, size_bytes=size, sha256=f"{day:064x}")))


def only(found: PastReleases) -> Line:
    (line,) = found.lines
    return line
