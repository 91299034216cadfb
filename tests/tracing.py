"""What torch looks up or traces anew for every graph, though it is the same, looked up and traced once.

Its thousand translations to ONNX, each with a signature read from its source, and the operators that its own libraries
register: once a process, a third of a small graph's time. Where a later torch calls them otherwise, tests run as they
do without this. And the graphs of models that are the same to the last weight: once for all processes and runs, as long
as what traces them is the same.
"""

import functools
import hashlib
import importlib
import io
import os
import pickle
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import onnx
import pytest
import torch

ROOT = Path(__file__).parents[1]
# What modules of a model are made of, and what makes graphs of them; a test's own modules count by their files.
SOURCES = ("corp_deploy/algebra", "corp_deploy/families", "corp_deploy/reduction", "export/graph", "ground")
ROOMS = ("calib", "corp_deploy", "export", "ground", "perf")
PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir", "timm", "torchvision", "transformers", "numpy")


once_s = 0.0
"""Seconds of the processor that went into what is done once a process, whichever test comes first."""


def look_up_once() -> None:
    """From the first graph on: what tracing imports takes seconds, and most tests trace nothing."""
    traced, patch = torch.onnx.export, pytest.MonkeyPatch()

    @functools.wraps(traced)
    def first(*words: Any, **named: Any) -> Any:
        global once_s
        patch.undo()
        began = time.process_time()
        _keep("torch.onnx._internal.exporter._registration", "ONNXRegistry.from_torchlib")
        _keep("torch._export.utils", "_materialize_cpp_cia_ops")
        _match_by_operator()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), dynamo=True, verbose=False)
        once_s += time.process_time() - began
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


def _match_by_operator() -> None:
    """A rule whose first operator is another than the node's can't match; onnxscript walks through the whole graph for
    some of its rules before it finds that, a third of a large graph's time.
    """
    try:
        owner: Any = importlib.import_module("onnxscript.rewriter._rewrite_rule").RewriteRule
        tried = owner.try_rewrite
    except (ImportError, AttributeError):
        return

    @functools.wraps(tried)
    def try_rewrite(self: Any, model: Any, graph: Any, node: Any, **named: Any) -> Any:
        pattern = getattr(self._matcher, "pattern", None)
        nodes = getattr(pattern, "output_nodes", None)
        if nodes and not nodes[0].op.matches(node.op_type):
            return None
        return tried(self, model, graph, node, **named)

    owner.try_rewrite = try_rewrite


def kept_graphs() -> Path:
    """Where they are kept, in a folder named by the sources and versions that graphs come of; other folders go."""
    told = hashlib.sha256(sys.version.encode())
    for name in PACKAGES:
        told.update(f"{name} {version(name) if find_spec(name.replace('-', '_')) else 'absent'}".encode())
    for room in SOURCES:
        for path in sorted((ROOT / room).rglob("*.py")):
            told.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    directory = ROOT / "build" / "graphs" / told.hexdigest()[:16]
    if not directory.is_dir():
        shutil.rmtree(directory.parent, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def trace_once(directory: Path) -> None:
    """Trace models that are the same to the last attribute and weight once for all who keep their graphs there."""
    from export.graph import to_onnx

    to_onnx._trace = _once(to_onnx._trace, directory)


def trace_as_tests_do() -> None:
    """In a process of its own."""
    look_up_once()
    trace_once(kept_graphs())


def _once(trace: Callable[..., onnx.ModelProto], directory: Path) -> Callable[..., onnx.ModelProto]:
    @functools.wraps(trace)
    def kept(*words: Any, **named: Any) -> onnx.ModelProto:
        key = _digest((words, named))
        path = directory / f"{key}.onnx"
        if key is not None and path.is_file():
            return onnx.load_from_string(path.read_bytes())
        proto = trace(*words, **named)
        if key is not None:
            directory.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(proto.SerializeToString())
            partial.rename(path)
        return proto

    return kept


class _Pickler(pickle.Pickler):
    """A tensor by its kind, shape and bytes, as torch's own pickles tell of addresses; hooks without the numbers that a
    process counts them by; a function within a function by its code and what it closes over.
    """

    def reducer_override(self, value: object) -> Any:
        match value:
            case torch.Tensor():
                data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                facts = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
                return str, (facts,)
            case torch.nn.Module():
                state = {name: list(held.values()) if "hooks" in name else held for name, held in vars(value).items()}
                return type(value).__name__.format, (type(value), _written(type(value).__module__), state)
            case FunctionType() if "<locals>" in value.__qualname__:
                closed = [cell.cell_contents for cell in value.__closure__ or ()]
                code = (value.__code__.co_code, value.__code__.co_names, repr(value.__code__.co_consts))
                return value.__qualname__.format, (code, closed, value.__defaults__, value.__kwdefaults__)
        return NotImplemented


@functools.cache
def _written(module: str) -> bytes:
    """The file that a class of a model was written in, where that is none of SOURCES and of no package."""
    if module not in sys.modules:
        raise pickle.PicklingError(f"{module} is not there, so nobody knows what is in it")
    path = Path(getattr(sys.modules[module], "__file__", None) or ROOT)
    known = module.split(".")[0] in ROOMS or "site-packages" in path.parts
    return b"" if known else path.read_bytes()


def _digest(value: object) -> str | None:
    """Of all that makes a value what it is; None where that can't be told."""
    written = io.BytesIO()
    try:
        _Pickler(written).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, OSError):
        return None
    return hashlib.sha256(written.getvalue()).hexdigest()
