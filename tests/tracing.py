"""What torch looks up anew for every graph that it traces, looked up once a process: a third of a small graph's time.

Its thousand translations to ONNX, each with a signature read from its source, and the operators that its own libraries
register. Nothing here adds to either. Where a later torch calls them otherwise, tests run as they do without this.
"""

import functools
import importlib
from typing import Any

import pytest
import torch


def look_up_once() -> None:
    """From the first graph on: what tracing imports takes seconds, and most tests trace nothing."""
    traced, patch = torch.onnx.export, pytest.MonkeyPatch()

    @functools.wraps(traced)
    def first(*words: Any, **named: Any) -> Any:
        patch.undo()
        _keep("torch.onnx._internal.exporter._registration", "ONNXRegistry.from_torchlib")
        _keep("torch._export.utils", "_materialize_cpp_cia_ops")
        return traced(*words, **named)

    patch.setattr(torch.onnx, "export", first)


def _keep(module: str, name: str) -> None:
    """Let a function, or a class's method, answer as it did when it is asked the same again."""
    *owners, last = name.split(".")
    try:
        place = functools.reduce(getattr, owners, importlib.import_module(module))
        function = functools.cache(getattr(place, last))
    except (ImportError, AttributeError):
        return
    setattr(place, last, staticmethod(function) if owners else function)
