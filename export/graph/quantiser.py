"""INT8 and FP8 graphs of one model: balanced norms, ranges measured on calibration inputs, and Q/DQ pairs.

Balancing is SmoothQuant (Xiao et al. 2023, arXiv 2211.10438, equations 3 and 4): X W = (X / s)(s W), with 1/s folded
into the norm's weight and bias. It moves outliers of a norm's output into the weights of the layers that read it and
leaves the model's function unchanged. Without it a channel of large activations takes a tensor's range from the others.
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from ground.errors import BadInput, Missing
from ground.ports import OutputPort, Port
from ground.threads import thread_limit

from .check import check_onnx
from .number_format import CLIPPINGS, FORMATS, Clipping, Histogram, NumberFormat, clipping_range, weight_format
from .precision import NORMS, Norms
from .quantised import Layer, quantise_graph, quantised_layers
from .to_onnx import PREFIX, onnx_from_model
from .weights import module_of_node, notes_of, read_matrices, readers_by_value

Feeds = Mapping[str, NDArray[Any]]
Batches = Callable[[], Iterable[Feeds]]
"""A function that gives the same inputs at every call."""


def observe_values(
    proto: ModelProto, names: Collection[str], batches: Iterable[Feeds]
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the named values of a float32 graph for each batch. Raises Missing without ONNX Runtime."""
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
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise Missing(
            "onnxruntime is not installed, which runs the graph to measure ranges; pip install 'corp-deploy[cpu]'"
        ) from error
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # Higher levels hand FP8 values to operators that don't take them.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if (threads := thread_limit()) is not None:
        options.intra_op_num_threads = threads
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def collect_histograms(proto: ModelProto, names: Collection[str], batches: Iterable[Feeds]) -> dict[str, Histogram]:
    found = {name: Histogram() for name in names}
    for values in observe_values(proto, names, batches):
        for name, value in values.items():
            found[name].add(value, name)
    return found


def observe_outputs(proto: ModelProto, batches: Iterable[Feeds]) -> dict[str, NDArray[np.float32]]:
    names = [value.name for value in proto.graph.output]
    rows = list(observe_values(proto, names, batches))
    return {name: np.concatenate([row[name] for row in rows]) for name in names}


def largest_by_channel(
    proto: ModelProto, names: Collection[str], batches: Iterable[Feeds]
) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    for values in observe_values(proto, names, batches):
        for name, value in values.items():
            sizes = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0)
            found[name] = np.maximum(found.get(name, sizes), sizes)
    return found


STRENGTH = 0.5
_NORMS = ("LayerNormalization", "RMSNormalization")


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedNorm:
    norm: str
    readers: tuple[str, ...]
    value: str


def balanceable_norms(proto: ModelProto, model: nn.Module) -> tuple[BalancedNorm, ...]:
    """Return the norms over channels that have a weight and are read by linear layers only."""
    modules = dict(model.named_modules())
    matrices = {node.name: index for node, index, _ in read_matrices(proto)}
    readers, places = readers_by_value(proto.graph), list[BalancedNorm]()
    # A parameter that several modules share can't change for one of them.
    weight_uses = Counter(id(weight) for each in modules.values() for weight in each.parameters(recurse=False))
    output_names = {value.name for value in proto.graph.output}
    for node in proto.graph.node:
        if node.op_type not in _NORMS or node.output[0] in output_names:
            continue
        norm, own = module_of_node(node), readers[node.output[0]]
        paths = tuple(map(module_of_node, own))
        linear = [isinstance(modules.get(path), nn.Linear) for path in paths]
        if not own or not all(linear) or any(matrices.get(each.name) != 1 for each in own):
            continue
        weights = [getattr(modules.get(path), "weight", None) for path in (norm, *paths)]
        if all(weight_uses[id(weight)] == 1 for weight in weights):
            places.append(BalancedNorm(norm=norm, readers=paths, value=node.output[0]))
    return tuple(places)


@torch.no_grad()
def balance_(model: nn.Module, places: tuple[BalancedNorm, ...], largest: Mapping[str, NDArray[np.float32]]) -> None:
    """Move scales from norms into the layers after them, in place; `largest`: the largest |x| [C] by value."""
    for place in places:
        norm: Any = model.get_submodule(place.norm)
        linears = [model.get_submodule(path) for path in place.readers]
        weights = [linear.weight for linear in linears if isinstance(linear, nn.Linear)]
        scale_C = smoothing_scales(torch.from_numpy(largest[place.value]), [weight.detach() for weight in weights])
        norm.weight.copy_(norm.weight.double() / scale_C)
        if getattr(norm, "bias", None) is not None:
            norm.bias.copy_(norm.bias.double() / scale_C)
        for weight in weights:
            weight.copy_(weight.double() * scale_C)


def smoothing_scales(largest_C: Tensor, weights: list[Tensor]) -> Tensor:
    """Return SmoothQuant's s [C]: max |x_j|^a / max |w_j|^(1-a), scaled to mean logarithm 0; 1 where either is 0."""
    weight_C = torch.stack([weight.double().abs().amax(dim=0) for weight in weights]).amax(dim=0)
    activation_C = largest_C.double()
    alive_C = (weight_C > 0) & (activation_C > 0)
    log_C = STRENGTH * activation_C.clamp_min(1e-30).log() - (1 - STRENGTH) * weight_C.clamp_min(1e-30).log()
    if not bool(alive_C.any()):
        return torch.ones_like(log_C)
    return torch.where(alive_C, (log_C - log_C[alive_C].mean()).exp(), torch.ones_like(log_C))


ScaleChoice = Literal["auto"] | Clipping
JUDGED_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiser:
    """A balanced model's graphs in float32 and in `rest_precision`, with histograms of its values."""

    fp32_graph: ModelProto
    typed: ModelProto
    histograms: Mapping[str, Histogram]
    balanced: tuple[BalancedNorm, ...]
    batches: Batches
    rest_precision: str
    _ends: dict[tuple[str, Clipping], Mapping[str, float]] = field(default_factory=dict, repr=False)
    _clippings: dict[tuple[str, int], Clipping] = field(default_factory=dict, repr=False)

    def graph(
        self, precision: str, *, scales: ScaleChoice = "auto", keep: Sequence[str] = (), weight_bits: int = 8
    ) -> ModelProto:
        """Return the graph in `int8` or `fp8`, without quantising modules whose path a pattern of `keep` fits.

        `weight_bits` of INT8 weights are 8 or 7. Raises BadInput where a pattern fits nothing, no layer is left, or
        check_onnx refuses the graph.
        """
        form = FORMATS[precision]
        layers = quantised_layers(self.fp32_graph, keep)
        clipping = self.clipping(form, weight_bits) if scales == "auto" else scales
        proto = quantise_graph(self.typed, form, self._ends_of(layers, form, clipping), layers, weight_bits=weight_bits)
        fewer = weight_format(form, weight_bits) != form
        own = {
            "precision": precision,
            "rest": self.rest_precision,
            "scales": clipping,
            "keep_rest": " ".join(keep),
            "balanced": " ".join(place.norm for place in self.balanced),
            "quantised_layers": str(len(layers)),
            "weight_bits": str(weight_bits) if fewer else "",
        }
        notes = notes_of(proto) | {f"{PREFIX}{key}": value for key, value in own.items() if value}
        helper.set_model_props(proto, dict(sorted(notes.items())))
        reasons = check_onnx(proto, precision=precision, backend="onnxruntime")
        if reasons:
            raise BadInput("the quantised graph has faults:\n" + "\n".join(f"  {reason}" for reason in reasons))
        return proto

    def clipping(self, form: NumberFormat, weight_bits: int = 8) -> Clipping:
        """Return the clipping with the outputs nearest to the float32 graph's on the first batches.

        A smaller square error of activations isn't enough: the few values that it clips may be those that decide the
        outputs (Sun et al. 2024, arXiv 2402.17762).
        """
        key = form.name, weight_bits
        if key not in self._clippings:
            layers = quantised_layers(self.fp32_graph, ())
            exact = observe_outputs(self.fp32_graph, islice(self.batches(), JUDGED_BATCHES))
            errors: dict[Clipping, float] = {}
            for each in CLIPPINGS:
                ends = self._ends_of(layers, form, each)
                proto = quantise_graph(self.fp32_graph, form, ends, layers, weight_bits=weight_bits)
                errors[each] = _distance(observe_outputs(proto, islice(self.batches(), JUDGED_BATCHES)), exact)
            self._clippings[key] = min(CLIPPINGS, key=errors.__getitem__)
        return self._clippings[key]

    def _ends_of(self, layers: Sequence[Layer], form: NumberFormat, clipping: Clipping) -> dict[str, float]:
        key = form.name, clipping
        if key not in self._ends:
            self._ends[key] = {
                name: clipping_range(histogram, form, clipping) for name, histogram in self.histograms.items()
            }
        return {layer.node: self._ends[key][layer.activation] for layer in layers}


def build_quantiser(
    model: nn.Module,
    inputs: Sequence[Port],
    outputs: Sequence[OutputPort],
    batches: Batches,
    *,
    rest_precision: str = "fp16",
    balance: bool = True,
    opset: int | None = None,
    batch: int | None = None,
    metadata: Mapping[str, str],
    norms: Norms = NORMS,
) -> Quantiser:
    """Return graphs of a copy of the model, balanced if `balance`, and histograms of its values on `batches`.

    `rest_precision` is that of the layers that aren't quantised; the other arguments and BadInput are those of
    onnx_from_model.
    """
    own = copy.deepcopy(model).cpu().eval()

    def graph(precision: str, batch: int | None = None) -> ModelProto:
        return onnx_from_model(
            own, inputs, outputs, precision=precision, opset=opset, batch=batch, metadata=metadata, norms=norms
        )

    single = graph("fp32")
    places = balanceable_norms(single, own) if balance else ()
    if places:
        balance_(own, places, largest_by_channel(single, [place.value for place in places], batches()))
        single = graph("fp32")
    names = list(dict.fromkeys(layer.activation for layer in quantised_layers(single, ())))
    ranges = collect_histograms(single, names, batches())
    typed = single if rest_precision == "fp32" and batch is None else graph(rest_precision, batch)
    return Quantiser(
        fp32_graph=single,
        typed=typed,
        histograms=ranges,
        balanced=places,
        batches=batches,
        rest_precision=rest_precision,
    )


def _distance(new: Mapping[str, NDArray[np.float32]], exact: Mapping[str, NDArray[np.float32]]) -> float:
    sizes = {name: max(float(np.linalg.norm(values)), 1e-30) for name, values in exact.items()}
    return max(float(np.linalg.norm(new[name] - values)) / sizes[name] for name, values in exact.items())
