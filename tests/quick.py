"""Three tiers of tests: `make test` runs the quick ones, CI the slow ones too, the nightly workflow all of them.

`make test` takes 5 minutes on two cores, a minute of it for lint.

A test that has a reason of REASONS may take its time and says so, `@pytest.mark.slow("graph")`. `nightly` marks tests
of benchmarks, packaging and documentation, and forms of models that no rule of the code distinguishes. Any other test
takes at most SHARE of what all quick tests take together, or the quick run fails with its name. Seconds are those of
the processor, of the test's process and its children, so a slow or busy machine makes no difference.
"""

import os
from collections.abc import Generator, Mapping
from typing import Any

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
QUICK = "not slow and not nightly"
SLOW = "slow and not nightly"
SHARE, FEWEST = 1 / 50, 1000
"""Seven seconds of six minutes; of fewer tests than those, a share says nothing."""
_START = pytest.StashKey[float]()


def processor_s() -> float:
    """Seconds that this process and its children that have ended took so far, but for what is done once a process."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system - tracing.warm_up_s


def too_long(taken_s: Mapping[str, float]) -> list[str]:
    """A line for each test that takes too much of all that the tests of a quick run took."""
    limit_s = SHARE * sum(taken_s.values())
    return [
        f"{name} took {seconds:.1f} s of the processor, quick tests take at most {limit_s:.1f}, {SHARE:.2%} of all of "
        f"them: make it quicker, or say why it is slow: @pytest.mark.slow(reason) with one of {', '.join(REASONS)}"
        for name, seconds in taken_s.items()
        if seconds > limit_s
    ]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"slow(*reasons): left out by make test; reasons: {', '.join(REASONS)}")
    config.addinivalue_line("markers", "nightly: run by make test-all and the nightly workflow alone")
    config.pluginmanager.register(_Whole(config), "quick-whole")


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
    if call.when == "teardown":
        report.processor_s = processor_s() - item.stash[_START]
    return report


class _Whole:
    """Where the reports of all processes come together."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.taken_s, self.lines = config, dict[str, float](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.taken_s[report.nodeid] = getattr(report, "processor_s", 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(self.config, "workerinput")
        if self.config.option.markexpr == QUICK and len(self.taken_s) >= FEWEST and not is_worker:
            self.lines = too_long(self.taken_s)
            if self.lines and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines:
            terminalreporter.line(line, red=True)
