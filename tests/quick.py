"""Which tests are slow, for which reason, and what `make test`, which leaves those out, asks of all others.

A test that has a reason of REASONS may take its time and says so, `@pytest.mark.slow("graph")`; any other takes at most
LIMIT_S, or the quick run fails with its name. Seconds are of the processor, of this process and its children. A shared
processor's are up to twice as long as an idle one's, so the limit is twice what a quick test should take; where one is
slower still than that which the limit was found on, it is as many times longer.
"""

import os
import statistics
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from tests import tracing

REASONS = {
    "graph": "traces a graph through torch",
    "server": "starts an inference server",
    "engine": "builds an engine",
    "process": "starts a process",
    "training": "trains a network",
    "measurement": "times models until their intervals are narrow",
    "models": "reduces or runs many models, or one of its real size",
}
QUICK = "not slow"
LIMIT_S = 6.0
TURN_S, TURNS = 0.014, 15
"""What a turn of work takes on an idle core of a server of 2021."""
_START = pytest.StashKey[float]()


def processor_s() -> float:
    """Seconds that this process and its children that have ended took so far, but for what is done once a process."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system - tracing.once_s


def slowness() -> float:
    """How many times as long as there this processor takes now, once or more: arithmetic of Python and of matrices."""
    taken, square = [], np.ones((192, 192), dtype=np.float32)
    for _ in range(TURNS):
        began = time.thread_time()
        sum(number * number % 7 for number in range(150_000))
        for _ in range(10):
            np.minimum(square @ square, 1.0, out=square)
        taken.append(time.thread_time() - began)
    return max(1.0, statistics.median(taken) / TURN_S)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"slow(*reasons): left out by make test; reasons: {', '.join(REASONS)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A marker without a reason is no reason."""
    for item in items:
        for marker in item.iter_markers("slow"):
            if not marker.args or not set(marker.args) <= REASONS.keys():
                raise pytest.UsageError(f"{item.nodeid}: slow{marker.args}, give one or more of {', '.join(REASONS)}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[_START] = processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Behind the last part of a test, so that what its fixtures take counts too."""
    report = yield
    if call.when == "teardown" and report.passed and item.config.option.markexpr == QUICK:
        taken = processor_s() - item.stash[_START]
        if taken > LIMIT_S and taken > (limit_s := LIMIT_S * slowness()):
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {taken:.1f} s of the processor, quick tests take at most {limit_s:.1f}: make it "
                f"quicker, or say why it is slow: @pytest.mark.slow(reason) with one of {', '.join(REASONS)}"
            )
    return report
