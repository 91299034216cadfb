"""A cache of traced ONNX graphs for all tests and runs, and tables of torch's exporter that are read once a process.

Graphs are kept in build/graphs by the digest of the call that traced them (`tests/graph_keys.py`): equal code, equal
weights and equal arguments give the same graph. A call whose digest can't be taken is traced, and counted with the
reason; the last line of a run has the counts. Processes that tests start are not counted.
"""

import copy
import functools
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from tests.graph_keys import NotCacheable, digest

DIRECTORY = Path(__file__).parents[1] / "build" / "graphs"
PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir", "timm", "torchvision", "transformers", "numpy")
UNUSED_S = 14 * 24 * 3600.0
"""After which a graph that no test asked for is deleted."""
CACHED, TRACED, NOT_CACHEABLE = "from the cache", "traced", "not cacheable: "

counts = Counter[str]()
"""Graphs of this process, and of the workers that have ended."""
warm_up_s = 0.0
"""CPU seconds that the first export took for what is done once a process, whichever test comes first."""


def warm_up_at_first_export() -> None:
    """Share the exporter's tables from the first graph on: its imports take seconds, and most tests trace nothing."""
    export, patch = torch.onnx.export, pytest.MonkeyPatch()

    @functools.wraps(export)
    def first_export(*arguments: Any, **options: Any) -> Any:
        global warm_up_s
        patch.undo()
        began_s = time.process_time()
        share_translations()
        share_operators()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), dynamo=True, verbose=False)
        warm_up_s += time.process_time() - began_s
        return export(*arguments, **options)

    patch.setattr(torch.onnx, "export", first_export)


def share_translations() -> None:
    """Read torch's thousand translations to ONNX once, and give each export a table of its own of them."""
    from torch.onnx._internal.exporter import _registration

    registry_type: Any = _registration.ONNXRegistry
    read = functools.cache(registry_type.from_torchlib)

    def from_torchlib(*arguments: Any, **options: Any) -> Any:
        registry = copy.copy(read(*arguments, **options))
        registry.functions = {name: list(each) for name, each in registry.functions.items()}
        return registry

    registry_type.from_torchlib = staticmethod(from_torchlib)


def share_operators() -> None:
    """Look up torch's composite operators again only where a library has registered others."""
    from torch._export import utils

    look_up, registered = utils._materialize_cpp_cia_ops, list[str]()

    def materialize() -> None:
        now = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if now != registered:
            look_up()
            registered[:] = now

    utils._materialize_cpp_cia_ops = materialize


def cache_graphs(directory: Path = DIRECTORY) -> None:
    """Read graphs that were traced before from this directory; delete those that were not asked for in two weeks."""
    from export.graph import to_onnx

    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.onnx*"):
        if path.stat().st_mtime < time.time() - UNUSED_S:
            path.unlink(missing_ok=True)
    to_onnx._trace = cached(to_onnx._trace, directory)


def trace_as_tests_do() -> None:
    """Share the cache in a process that a test starts; its graphs are not counted."""
    warm_up_at_first_export()
    cache_graphs()


def cached(trace: Callable[..., onnx.ModelProto], directory: Path) -> Callable[..., onnx.ModelProto]:
    """Trace only what has no graph in the directory yet."""

    @functools.wraps(trace)
    def from_cache(*arguments: Any, **options: Any) -> onnx.ModelProto:
        try:
            key = digest(_versions(), _settings(), share_translations, share_operators, trace, arguments, options)
        except NotCacheable as error:
            counts[f"{NOT_CACHEABLE}{error}"] += 1
            counts[TRACED] += 1
            return trace(*arguments, **options)
        path = directory / f"{key}.onnx"
        try:
            proto = onnx.load_from_string(path.read_bytes())
        except FileNotFoundError:
            counts[TRACED] += 1
            with torch.random.fork_rng(devices=[]):  # or tests would draw other numbers behind a hit
                proto = trace(*arguments, **options)
            partial = path.with_suffix(f".onnx.{os.getpid()}")
            partial.write_bytes(proto.SerializeToString())
            partial.rename(path)
        else:
            counts[CACHED] += 1
            path.touch()
        return proto

    return from_cache


@functools.cache
def _versions() -> tuple[str, ...]:
    installed = (version(name) if find_spec(name.replace("-", "_")) else "" for name in PACKAGES)
    return sys.version, *installed


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch that change what it does in this process."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.overrides._get_current_function_mode_stack(),
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
    )


class GraphCounts:
    """The pytest plugin that reports the counts of all workers at the end of a run."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["graphs"] = dict(counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        counts.update(getattr(node, "workeroutput", {}).get("graphs", {}))  # a worker that crashed has none

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if counts:
            terminalreporter.line(counts_line(counts))


def counts_line(of: Mapping[str, int]) -> str:
    """The line that reports where the graphs of a run came from, and which values can't be digested."""
    refused = {name.removeprefix(NOT_CACHEABLE): each for name, each in of.items() if name.startswith(NOT_CACHEABLE)}
    types = f" ({', '.join(f'{name}: {refused[name]}' for name in sorted(refused))})" if refused else ""
    return (
        f"graphs: {of.get(CACHED, 0)} from the cache, {of.get(TRACED, 0)} traced, "
        f"{sum(refused.values())} of them not cacheable{types}"
    )
