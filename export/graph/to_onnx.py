"""Typed ONNX graphs of torch models: ports are float32, names are module paths, and bytes are reproducible.

Operations that torch's exporter can't write, or writes in a form that builders can't use, are rewritten first.
"""

import importlib.metadata
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from google.protobuf.message import EncodeError
from onnxscript import opset20
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ground.errors import BadInput
from ground.ports import OutputPort, Port
from ground.precision import MIXED, PRECISIONS, QUANTISED, type_by_name

from . import tidy
from .check import MAX_BYTES, SPELLED_OUT, check_onnx, decomposed_norms, unsupported_nodes
from .ports import port_notes
from .precision import NORMS, Norms, typed_copy

HIDDEN = -30_000.0
"""The score of keys that a query doesn't see: representable in half precision, and zero after a softmax."""


class FourAxes(TorchFunctionMode):
    """A mode in which attention has four axes, a batch and heads in front, as the exporter needs it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default):
            return _attend_in_four_axes(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend_in_four_axes(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *more: Any,
    **options: Any,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # For a boolean mask the exporter guards rows without keys, and no engine fuses across that guard.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, HIDDEN)
    if query.dim() == 4:
        return attention(query, key, value, attn_mask, *more, **options)
    if attn_mask is not None and attn_mask.dim() == 3 == query.dim():
        attn_mask = attn_mask.unsqueeze(1)
    elif attn_mask is not None and attn_mask.dim() > 3:
        attn_mask = _to_four_axes(attn_mask.expand(*query.shape[:-2], *attn_mask.shape[-2:]))
    output = attention(_to_four_axes(query), _to_four_axes(key), _to_four_axes(value), attn_mask, *more, **options)
    return output.reshape(*query.shape[:-1], value.shape[-1])


def _to_four_axes(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 3 else x.reshape(-1, *x.shape[-3:])


def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """Clamp by Max and Min, as onnxscript's Clip loses the names of bounds when a tensor is clamped twice."""
    bounds = [None if each is None else opset20.CastLike(each, self) for each in (min, max)]
    if all(each is None or len(each.shape) == 0 for each in (min, max)):
        return opset20.Clip(self, *bounds)
    for bound, operator in zip(bounds, (opset20.Max, opset20.Min), strict=True):
        self = self if bound is None else operator(self, bound)
    return self


DTYPES = ("float32", "uint8", "int64", "int32", "bool")  # of inputs, as numpy and torch name them


def _build_samples(ports: Sequence[Port], batch: int) -> dict[str, Tensor]:
    """Return a tensor [batch, *shape] for each port: zeros, and ones for integer or bool ports named `*mask`."""
    masks = {port.name for port in ports if port.dtype != "float32" and port.name.endswith("mask")}
    return {
        port.name: torch.full((batch, *port.shape), int(port.name in masks), dtype=getattr(torch, port.dtype))
        for port in ports
    }


OPSETS = range(20, 24)  # below 20 GELU is expanded into its formula; TensorRT's parsers read up to 23
BATCH = "batch"
PREFIX = "export."
_NEWER_HINT = f"\n  opset {OPSETS[-1]} works: export with --opset {OPSETS[-1]}, or leave --opset out"


def _graph_bytes(model: nn.Module, precision: str) -> int:
    """Return the bytes of a graph's weights: in float32 if quantised, a lower bound if mixed."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values()
    float_bytes = 4 if precision in QUANTISED else type_by_name(precision).size_bytes
    return sum(each.numel() * (float_bytes if each.is_floating_point() else each.element_size()) for each in tensors)


def require_size(model: nn.Module, precision: str) -> None:
    """Raise BadInput for weights that a single ONNX file can't hold in this precision."""
    size_bytes = _graph_bytes(model, precision)
    if size_bytes >= MAX_BYTES:
        fits = [name for name in PRECISIONS if name not in MIXED and _graph_bytes(model, name) < MAX_BYTES]
        remedy = f"give precision {' or '.join(fits)}" if fits else "take a smaller model"
        raise BadInput(
            f"the weights take {size_bytes:,} bytes in {precision}, and one ONNX file has to hold them in fewer than "
            f"{MAX_BYTES:,}; {remedy}"
        )


def onnx_from_model(
    model: nn.Module,
    inputs: Sequence[Port],
    outputs: Sequence[OutputPort],
    *,
    precision: str,
    keep_fp32: Sequence[str] = (),
    opset: int | None = None,
    batch: int | None = None,
    metadata: Mapping[str, str],
    norms: Norms = NORMS,
) -> onnx.ModelProto:
    """Export by torch's dynamo exporter: a named tensor [batch,*shape] for each input, a float32 one for each output.

    `opset` None takes the first of OPSETS that has the operators. `batch` None keeps it symbolic. `metadata` is stored
    beside the entries `export.*`. Softmax and `norms` are computed in float32. Equal inputs give equal bytes. Raises
    BadInput when the model can't be traced or typed, or when check_onnx refuses the graph.
    """
    assert opset is None or opset in OPSETS, opset
    assert all(key[: len(PREFIX)] != PREFIX for key in metadata), metadata
    _refuse_invalid_ports(inputs, outputs)
    require_size(model, precision)
    with torch.no_grad():
        typed = typed_copy(model, precision, keep_fp32, norms=norms)
    samples = _build_samples(inputs, batch or 2)
    names = [*(port.name for port in inputs), *(port.name for port in outputs)]

    def exported(version: int) -> tuple[onnx.ModelProto, list[str]]:
        with torch.no_grad():
            proto = _trace(typed, samples, len(outputs), opset=version, dynamic=batch is None)
        tidy.tidy_graph(proto, modules={name for name, _ in typed.named_modules()}, parameters=set(typed.state_dict()))
        tidy.name_ports(proto.graph, dict(zip(_traced_names(len(inputs), len(outputs)), names, strict=True)))
        _refuse_other_shape(proto, version, batch)
        own = {"precision": precision, "opset": str(version), "keep_fp32": " ".join(keep_fp32)}
        own |= {package: importlib.metadata.version(package) for package in ("torch", "onnx", "onnxscript")}
        noted = {f"{PREFIX}{key}": value for key, value in own.items() if value}
        notes = {**metadata, **port_notes(inputs, outputs), **noted}
        onnx.helper.set_model_props(proto, dict(sorted(notes.items())))
        return proto, check_onnx(proto, precision=precision, backend="onnxruntime", inputs=inputs, outputs=outputs)

    proto, reasons = exported(opset or OPSETS[0])
    hint = ""
    if opset is None and (newer_ones := [first for _, first in unsupported_nodes(proto) if first is not None]):
        proto, reasons = exported(max(newer_ones))
    refused = any(SPELLED_OUT in reason for reason in reasons)
    if opset != OPSETS[-1] and (refused or (opset is None and any(decomposed_norms(proto)))):
        newer, remaining = exported(OPSETS[-1])
        has_operators = any(node.op_type == "RMSNormalization" for node in newer.graph.node)
        if opset is None and not remaining and (refused or has_operators):
            return newer
        hint = "" if remaining else _NEWER_HINT
    if reasons:
        raise BadInput("the exported graph has faults:\n" + "\n".join(f"  {reason}" for reason in reasons) + hint)
    return proto


def onnx_bytes(proto: onnx.ModelProto) -> bytes:
    """Serialise a graph in protobuf's deterministic order. Raises BadInput for too many bytes."""
    try:
        return bytes(proto.SerializeToString(deterministic=True))
    except EncodeError:
        reason = f"the graph and its constants take more bytes than a single ONNX file may, {MAX_BYTES}; try fp16"
        raise BadInput(reason) from None


def save_onnx(proto: onnx.ModelProto, path: Path) -> None:
    path.write_bytes(onnx_bytes(proto))


def _refuse_invalid_ports(inputs: Sequence[Port], outputs: Sequence[OutputPort]) -> None:
    if not inputs or not outputs:
        raise BadInput(f"a graph needs at least one input and one output, got {len(inputs)} and {len(outputs)}")
    names = [*(port.name for port in inputs), *(port.name for port in outputs)]
    if len(set(names)) < len(names) or "" in names:
        raise BadInput(f"each input and output needs a name of its own, got {', '.join(map(repr, names))}")
    for port in inputs:
        if port.dtype not in DTYPES:
            raise BadInput(f"{port.name}: got the type {port.dtype!r}, expected one of {', '.join(DTYPES)}")
        if not port.shape or min(port.shape) < 1:
            raise BadInput(
                f"{port.name}: the shape behind the batch needs sizes of at least 1, such as (channels, height, width) "
                f"of images, got {port.shape}"
            )


def _refusal(model: nn.Module, samples: Mapping[str, torch.Tensor], error: Exception) -> str:
    """Describe why tracing failed: by the model's error if it can't run the samples, else by the tracer's."""
    try:
        model(*samples.values())
    except (RuntimeError, AssertionError, ValueError, TypeError, IndexError) as own:
        shapes = ", ".join(f"{name} of shape {list(sample.shape)}" for name, sample in samples.items())
        return f"the model refuses {shapes}: {_first_line(own)}"
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return f"torch can't trace this model into a graph: {_first_line(cause)}"


def _traced_names(inputs: int, outputs: int) -> list[str]:
    """Return names for tracing that no port has."""
    sides = (("input", inputs), ("output", outputs))
    return [f"{PREFIX}{side}.{index}" for side, count in sides for index in range(count)]


def _trace(
    model: nn.Module, samples: Mapping[str, torch.Tensor], outputs: int, *, opset: int, dynamic: bool
) -> onnx.ModelProto:
    names = _traced_names(len(samples), outputs)
    with warnings.catch_warnings(), FourAxes():
        warnings.simplefilter("ignore")  # the exporter warns about its own deprecations; restored on leaving
        try:
            program = torch.onnx.export(
                model,
                tuple(samples.values()),
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=names[: len(samples)],
                output_names=names[len(samples) :],
                dynamic_shapes=tuple({0: BATCH} for _ in samples) if dynamic else None,
                custom_translation_table={torch.ops.aten.clamp.Tensor: _clamp},
            )
        except torch.onnx.OnnxExporterError as error:
            raise BadInput(_refusal(model, samples, error)) from error
    assert program is not None
    return program.model_proto


def _refuse_other_shape(proto: onnx.ModelProto, opset: int, batch: int | None) -> None:
    received = {entry.domain: entry.version for entry in proto.opset_import}
    if received.get("") != opset:
        raise BadInput(f"asked for opset {opset}, this torch could only write {received}; choose another opset")
    values = [value for value in (*proto.graph.input, *proto.graph.output) if value.type.tensor_type.shape.dim]
    for value in values:  # check_onnx refuses a value without sizes
        dim = value.type.tensor_type.shape.dim[0]
        if batch is None and not dim.dim_param:
            raise BadInput(f"{value.name}: the batch came out fixed at {dim.dim_value}; the model's code depends on it")
        if batch is not None and dim.dim_value != batch:
            raise BadInput(f"{value.name}: the batch came out as {dim.dim_param or dim.dim_value}, asked for {batch}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
