"""One thread a process: tests run side by side, and threads that wait for each other would only cost time."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.network import stay_here
from tests.tracing import GraphCounts, cache_graphs, warm_up_at_first_export

pytest_plugins = ("tests.quick",)

torch.set_num_threads(1)
warm_up_at_first_export()
# The same examples in every run: what fails, fails again.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# A file is run by one process: those of few but long tests go first, or the others would wait for them at the end.
LONGEST = (
    # First of all in its process: a device that is registered behind the first gradient has no queue for its own.
    "test_pretended_device.py",
    "test_docs_pages.py",
    "test_corp_schedule.py",
    "test_corp_latency.py",
    "test_readme.py",
    "test_timm_planted.py",
    "test_convnets.py",
    "test_corp_printed.py",
    "test_export_to_onnx.py",
    "test_corp_quantised.py",
    "test_corp_polish.py",
    "test_timm_structure.py",
    "test_timm_loops.py",
    "test_corp_release.py",
    "test_wheel.py",
    "test_bench_tried.py",
    "test_bench_methods.py",
)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GraphCounts(), "graph-counts")


@pytest.fixture(scope="session", autouse=True)
def _graphs_cached() -> None:
    """Share traced graphs between all workers and runs."""
    cache_graphs()


@pytest.fixture(scope="session", autouse=True)
def _nothing_outside() -> Iterator[None]:
    """No test reaches a network, whatever it calls; servers of its own are on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        stay_here(patch, loopback=True)
        yield


@pytest.fixture(scope="session", autouse=True)
def _state_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is built in tests is not listed among the user's own engines, and annotates no run that they are part of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GITHUB_ACTIONS", raising=False)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, all others in their order."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


def pytest_runtest_setup() -> None:
    """Whatever a benchmark's command that was called before has set for its own process."""
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is imported by now stays: half a million objects that no later collection needs to walk through again.

    Graphs are traced by allocating millions of objects that go by themselves; collections are for circles alone.
    """
    _keep()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def _kept() -> None:
    """What earlier files left are caches: every measurement collects first, and would walk through them each time."""
    _keep()


def _keep() -> None:
    gc.collect()
    gc.freeze()
    # The count of what is frozen walks through all of it, and who asks wants to know whether anything is.
    gc.get_freeze_count = lambda: 1
