"""Typed graphs whose linear layers and convolutions read INT8 or FP8, and a simulation of the same in torch.

Symmetric Q/DQ pairs stand in front of every such layer, one for each tensor; weights are stored with a scale for each
output channel. Norms, softmax, attention's products and residual additions keep their type, as does a layer with a
single output. The simulation, a reference for errors, takes the largest values as ranges.
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ground.errors import BadInput

from .number_format import FORMATS, NumberFormat, weight_format
from .weights import READERS, attribute_of, declared_types, drop_unread, module_of_node, read_matrices

_NAMES = ("linear", "conv1d", "conv2d", "conv3d")
LAYERS = frozenset(
    [getattr(functional, name) for name in _NAMES] + [getattr(torch.ops.aten, name).default for name in _NAMES]
)
Run = Callable[[nn.Module], object]


def simulate_quantisation(model: nn.Module, precision: str, run: Run) -> nn.Module:
    """Return a copy on the CPU that rounds layers' weights and inputs; `run` calls it on inputs to measure ranges."""
    ranges = _Ranges(form=FORMATS[precision])
    own = Simulated(copy.deepcopy(model).cpu().float().eval(), ranges)
    with torch.inference_mode():
        run(own)
    ranges.is_watching = False
    return own


@dataclass(slots=True, kw_only=True)
class _Ranges:
    """The largest |x| of each layer's input and its rounded weights, by call order; copies of a model share them."""

    form: NumberFormat
    is_watching: bool = True
    ends: dict[int, float] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Ranges":
        return self


class Simulated(nn.Module):
    def __init__(self, model: nn.Module, ranges: _Ranges) -> None:
        super().__init__()
        self.model, self.ranges = model, ranges

    def forward(self, *args: Any) -> Any:
        with _Layers(self.ranges):
            return self.model(*args)


class _Layers(TorchFunctionMode):
    def __init__(self, ranges: _Ranges) -> None:
        super().__init__()
        self.ranges, self.count = ranges, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in LAYERS or len(args) < 2 or len(args[1]) == 1:
            return func(*args, **(kwargs or {}))
        number, ranges, form = self.count, self.ranges, self.ranges.form
        self.count += 1
        x, weight, *others = args
        if ranges.is_watching:
            ranges.ends[number] = max(ranges.ends.get(number, 0.0), float(x.detach().abs().max()))
            return func(*args, **(kwargs or {}))
        if number not in ranges.weights:
            values = weight.detach().numpy()
            ends = np.abs(values).max(axis=tuple(range(1, values.ndim)), keepdims=True)
            ranges.weights[number] = _rounded(weight, form, np.maximum(ends / form.largest, 2.0**-100))
        x = _rounded(x, form, max(ranges.ends[number] / form.largest, 2.0**-100))
        return func(x, ranges.weights[number], *others, **(kwargs or {}))


def _rounded(x: Tensor, form: NumberFormat, scale: Any) -> Tensor:
    return torch.from_numpy(form.rounded(x.detach().numpy(), scale))


_SCALE_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A node that multiplies a stored weight with the value `activation`."""

    node: str
    activation: str

    @property
    def module(self) -> str:
        return self.node.rpartition("/")[0]


def weighted_layers(proto: ModelProto) -> tuple[Layer, ...]:
    """Return convolutions with several outputs, and linear layers with several inputs and outputs, in graph order."""
    stored = {tensor.name for tensor in proto.graph.initializer}
    return tuple(
        Layer(node=node.name, activation=node.input[1 - index])
        for node, index, weight in read_matrices(proto)
        if node.input[1 - index] not in stored
        and not (weight.dims[0] == 1 if node.op_type == "Conv" else 1 in weight.dims[-2:])
    )


def quantised_layers(proto: ModelProto, keep: Sequence[str]) -> tuple[Layer, ...]:
    """Return the layers that no pattern keeps. Raises BadInput for a pattern that fits none, and if none is left."""
    every = weighted_layers(proto)
    idle = [pattern for pattern in keep if not any(_fits(each.module, pattern) for each in every)]
    if idle:
        shown = ", ".join(each.module for each in every[:6])
        raise BadInput(
            f"{', '.join(map(repr, idle))} fits no layer that can be quantised; those of this model are {shown}, ..."
        )
    selected = tuple(each for each in every if not any(_fits(each.module, pattern) for pattern in keep))
    if not selected:
        raise BadInput(f"none of the {len(every)} layers would be quantised; keep fewer, or export fp16")
    return selected


def _fits(module: str, pattern: str) -> bool:
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1))


def quantise_graph(
    proto: ModelProto, form: NumberFormat, ends: Mapping[str, float], layers: Collection[Layer], *, weight_bits: int = 8
) -> ModelProto:
    """Return a copy of the graph in which these layers read Q/DQ pairs of the number format `form`.

    `ends` gives by node the |x| that becomes the format's largest number; `weight_bits` is for INT8 weights.
    """
    new = ModelProto()
    new.CopyFrom(proto)
    types = declared_types(onnx.shape_inference.infer_shapes(proto).graph)
    at = {layer.node: ends[layer.node] for layer in layers}
    assert at.keys() <= {node.name for node in proto.graph.node}, sorted(at)
    graph, nodes = new.graph, list[NodeProto]()
    stored = {tensor.name: tensor for tensor in graph.initializer}
    writer = _Writer(form=form, weights=weight_format(form, weight_bits), types=types, stored=stored)
    for node in graph.node:
        if node.name in at and node.op_type in READERS:
            nodes += writer.in_front_of(node, at[node.name])
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(writer.stored_tensors)
    drop_unread(graph)
    return new


class _Writer:
    def __init__(
        self, *, form: NumberFormat, weights: NumberFormat, types: Mapping[str, int], stored: Mapping[str, TensorProto]
    ) -> None:
        self._form, self._weights, self._types, self._stored = form, weights, types, stored
        self._read: dict[tuple[str, float | int], str] = {}
        self._name_counts = Counter[str]()
        self.stored_tensors: list[TensorProto] = []

    def in_front_of(self, node: NodeProto, end: float) -> Iterator[NodeProto]:
        index = next(place for place in (1, 0) if node.input[place] in self._stored)
        weight, activation = node.input[index], node.input[1 - index]
        axis = _output_axis(node, index, len(self._stored[weight].dims))
        if (weight, axis) not in self._read:
            yield self._weight(node, weight, axis)
        if (activation, end) not in self._read:
            yield from self._activation(node, activation, end)
        node.input[index], node.input[1 - index] = self._read[weight, axis], self._read[activation, end]

    def _weight(self, node: NodeProto, name: str, axis: int) -> NodeProto:
        tensor = self._stored[name]
        values = numpy_helper.to_array(tensor).astype(np.float32)
        others = tuple(place for place in range(values.ndim) if place != axis)
        scales = self._typed(np.abs(values).max(axis=others) / self._weights.largest, tensor.data_type)
        wide = scales.astype(np.float32)
        stored = self._weights.stored(values, np.expand_dims(wide, others))
        self._keep(stored, f"{name}.{self._form.name}", self._form.float_type.onnx)
        self._keep(scales, f"{name}.scale", tensor.data_type)
        self._read[name, axis] = f"{name}.dequantized"
        reads = [f"{name}.{self._form.name}", f"{name}.scale"]
        return self._node("DequantizeLinear", node, reads, f"{name}.dequantized", axis=axis)

    def _activation(self, node: NodeProto, name: str, end: float) -> Iterator[NodeProto]:
        kind = self._types[name]
        scale = self._typed(np.asarray(end / self._form.largest, dtype=np.float32), kind)
        stem = f"{node.name}.input"
        self._keep(scale, f"{stem}.scale", kind)
        self._keep(np.zeros((), self._form.dtype), f"{stem}.zero", self._form.float_type.onnx)
        small, self._read[name, end] = f"{stem}.{self._form.name}", f"{stem}.dequantized"
        reads = [f"{stem}.scale", f"{stem}.zero"]
        yield self._node("QuantizeLinear", node, [name, *reads], small)
        yield self._node("DequantizeLinear", node, [small, *reads], self._read[name, end])

    def _node(self, kind: str, reader: NodeProto, reads: Sequence[str], gives: str, **attributes: Any) -> NodeProto:
        stem = "/".join(filter(None, (module_of_node(reader), kind)))
        name = f"{stem}_{self._name_counts[stem]}" if self._name_counts[stem] else stem
        self._name_counts[stem] += 1
        return helper.make_node(kind, reads, [gives], name=name, **attributes)

    def _typed(self, scales: NDArray[Any], kind: int) -> NDArray[Any]:
        assert kind in _SCALE_TYPES, kind
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        least = 2.0**-20 if kind == TensorProto.FLOAT16 else 2.0**-100
        typed: NDArray[Any] = np.maximum(scales, least).astype(dtype)
        return typed

    def _keep(self, values: NDArray[Any], name: str, kind: int) -> None:
        tensor = numpy_helper.from_array(values, name)
        assert tensor.data_type == kind, (name, tensor.data_type, kind)
        self.stored_tensors.append(tensor)


def _output_axis(node: NodeProto, index: int, rank: int) -> int:
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        flag = attribute_of(node, ("transA", "transB")[index])
        return int(flag == 0) if index else flag
    return rank - 1 if index else rank - 2
