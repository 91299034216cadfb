"""What flows through a float32 graph on real inputs: it is run in ONNX Runtime with more outputs."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from ground.errors import Missing

from .number_format import Histogram

Feeds = Mapping[str, NDArray[Any]]
Batches = Callable[[], Iterable[Feeds]]
"""The same inputs again at every call."""


def observed(proto: ModelProto, names: Collection[str], batches: Iterable[Feeds]) -> Iterator[dict[str, NDArray[Any]]]:
    """Of each batch what these values of a float32 graph are, inputs of the graph among them. Raises Missing without
    ONNX Runtime.
    """
    wider = ModelProto()
    wider.CopyFrom(proto)
    border = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    input_names = {value.name for value in proto.graph.input}
    wider.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in border
    )
    requested = [name for name in names if name not in input_names]
    session = session_of(wider)
    for batch in batches:
        outputs = dict(zip(requested, session.run(requested, dict(batch)), strict=True)) if requested else {}
        yield outputs | {name: batch[name] for name in names if name in input_names}


def session_of(proto: ModelProto) -> Any:
    """A graph ready to run on the CPU. Raises Missing without ONNX Runtime."""
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise Missing(
            "onnxruntime is not installed, and ranges are taken by running the graph; pip install 'corp-deploy[cpu]'"
        ) from error
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # Its optimisations hand FP8 values to operators that take none.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def histograms(proto: ModelProto, names: Collection[str], batches: Iterable[Feeds]) -> dict[str, Histogram]:
    """How large the values of each tensor are, over all batches. Raises BadInput for values that are not finite."""
    found = {name: Histogram() for name in names}
    for values in observed(proto, names, batches):
        for name, value in values.items():
            found[name].add(value, name)
    return found


def observed_outputs(proto: ModelProto, batches: Iterable[Feeds]) -> dict[str, NDArray[np.float32]]:
    """What a graph gives, by output, of all batches together."""
    names = [value.name for value in proto.graph.output]
    rows = list(observed(proto, names, batches))
    return {name: np.concatenate([row[name] for row in rows]) for name in names}


def largest_by_channel(
    proto: ModelProto, names: Collection[str], batches: Iterable[Feeds]
) -> dict[str, NDArray[np.float32]]:
    """The largest |x| [C] at each place of the last axis."""
    found: dict[str, NDArray[np.float32]] = {}
    for values in observed(proto, names, batches):
        for name, value in values.items():
            sizes = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0)
            found[name] = np.maximum(found.get(name, sizes), sizes)
    return found
