"""Graphs and engines beside the torch models that they were made of."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from export.engine.audit import Audit, audit_fusion
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from export.engine.record import EngineRecord

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt-rtx is not installed (pip install tensorrt-rtx), so no engine can be built here",
)


def graph_of(text: str, *, opset: int = 20, ir: int = 10, **weights: Any) -> onnx.ModelProto:
    """A graph in ONNX's own text form, `(inputs) => (outputs) { nodes }`, that reads these weights."""
    graph = onnx.parser.parse_graph(f"graph {text}")
    graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=ir)


def session_of(graph: Path | onnx.ModelProto, *, optimised: bool = True) -> ort.InferenceSession:
    """On this CPU; or without the optimisations that give an FP8 value to operators that take none."""
    given, options = str(graph) if isinstance(graph, Path) else graph.SerializeToString(), ort.SessionOptions()
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def require_as_torch(
    graph: Path | onnx.ModelProto,
    asked: Callable[[int], tuple[NDArray[Any], NDArray[Any]]],
    bound: float,
    counts: Sequence[int] = (1, 5),
) -> None:
    """One output within `bound` of torch's at several batches; `asked`: so many inputs and torch's answers."""
    session = session_of(graph)
    (port,) = session.get_inputs()
    for count in counts:
        inputs, exact = asked(count)
        (got,) = session.run(None, {port.name: inputs.astype(np.float16 if "float16" in port.type else inputs.dtype)})
        assert np.linalg.norm(got.astype(np.float64) - exact) < bound * np.linalg.norm(exact), count


def built(graph: Path, batches: str, target: str = "86") -> EngineRecord:
    """The record of its engine by TensorRT-RTX."""
    options = BuildOptions(backend="tensorrt-rtx", profiles=(BatchProfile.from_text(batches),), sms=(target,))
    return build_engine(graph, options).record


def audited(dense: Path, reduced: Path) -> Audit:
    """Both engines."""
    (audit,) = audit_fusion(dense, reduced)
    return audit
