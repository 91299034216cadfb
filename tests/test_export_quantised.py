"""INT8 and FP8 graphs: their arithmetic, scales, kept modules and balanced norms."""

from collections.abc import Mapping
from typing import Any, cast

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from export.graph.number_format import BINS, FORMATS, Histogram, clipping_range, weight_format
from export.graph.quantised import quantise_graph, quantised_layers, weighted_layers
from export.graph.quantiser import (
    Quantiser,
    balance_,
    balanceable_norms,
    build_quantiser,
    largest_by_channel,
    session_of,
    smoothing_scales,
)
from export.graph.weights import notes_of
from ground.errors import BadInput
from ground.ports import LOGITS, image_port
from perf.timing.watch import has_vnni
from tests.export_vit import SHAPE, Vit, export, images
from tests.graphs import graph_of
from tests.graphs import session_of as plain_session
from tests.refusals import rejects

INPUTS, OUTPUTS = [image_port(SHAPE)], [LOGITS]
Array = NDArray[np.float32]


def batches() -> list[dict[str, Array]]:
    return [{"images": images(4, seed)} for seed in (1, 2)]


def made(model: nn.Module, **options: Any) -> Quantiser:
    return build_quantiser(model, INPUTS, OUTPUTS, batches, metadata={}, **options)


def run(proto: onnx.ModelProto, batch: Array) -> Array:
    return cast(Array, plain_session(proto, optimised=False).run(["logits"], {"images": batch})[0])


def error(new: Array, old: Array) -> float:
    return float(np.linalg.norm(new - old) / np.linalg.norm(old))


def to_int8(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).round().clamp(-127, 127) * scale


def by_hand(model: Vit, ends: Mapping[str, float], batch: Array) -> Array:
    """Run the torch model with hooks that round the inputs and weights of every linear layer and convolution."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            largest = module.weight.detach().flatten(1).abs().amax(dim=1).clamp_min(1e-30)
            scale = (largest / 127).reshape(-1, *(1,) * (module.weight.ndim - 1))
            module.weight.data = to_int8(module.weight.data, scale)
            module.register_forward_pre_hook(lambda _, args, end=ends[name]: (to_int8(args[0], end / 127),))
    with torch.no_grad():
        return cast(Array, model(torch.from_numpy(batch)).numpy())


def test_int8_graph_rounds_the_input_of_every_layer() -> None:
    own = made(Vit(), rest_precision="fp32", balance=False)
    proto = own.graph("int8", scales="max")
    ends = {layer.module: own.histograms[layer.activation].largest for layer in weighted_layers(own.fp32_graph)}
    batch = images(3, seed=5)
    expected = by_hand(Vit(), ends, batch)
    assert error(run(proto, batch), expected) < 2e-3  # values half-way between two steps may round either way
    assert 1e-3 < error(expected, run(own.fp32_graph, batch)) < 0.1
    reference = cast(list[Array], ReferenceEvaluator(proto).run(["logits"], {"images": batch}))[0]
    assert error(run(proto, batch), reference) < 2e-3


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("precision", "most"), [("int8", 0.06), ("fp8", 0.15)])
@pytest.mark.parametrize("rest_precision", ["fp32", "fp16"])
def test_each_quantised_form_is_near_the_model(precision: str, most: float, rest_precision: str) -> None:
    own = made(Vit(), rest_precision=rest_precision)
    proto = own.graph(precision)
    batch = images(8, seed=7)
    assert error(run(proto, batch), run(own.fp32_graph, batch)) < most
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    kinds = [stored[node.input[0]].data_type for node in proto.graph.node if node.input[0] in stored]
    assert kinds.count(FORMATS[precision].float_type.onnx) == len(weighted_layers(own.fp32_graph)) == 10
    notes = notes_of(proto)
    assert (notes["export.precision"], notes["export.quantised_layers"]) == (precision, "10")
    names = [node.name for node in proto.graph.node]
    assert "blocks.0.attn.qkv/QuantizeLinear" in names
    assert len(set(names)) == len(names)


def stored_weights(proto: onnx.ModelProto) -> dict[str, tuple[NDArray[np.int8], Array]]:
    """Return the stored integers of each weight by name, with their scales by output channel."""
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in stored]
    return {node.input[0]: (stored[node.input[0]], stored[node.input[1]]) for node in nodes}


@pytest.mark.slow("graph")
@pytest.mark.parametrize("rest_precision", ["fp32", "fp16", "bf16"])
def test_seven_bit_weights_end_at_63(rest_precision: str) -> None:
    own = made(Vit(), rest_precision=rest_precision)
    eight, seven = (stored_weights(own.graph("int8", scales="max", weight_bits=bits)) for bits in (8, 7))
    assert (eight.keys(), len(seven)) == (seven.keys(), 10)
    rounding = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2}[rest_precision]
    for name, (values, scales) in seven.items():
        assert values.dtype == np.int8
        assert np.abs(values.astype(int)).max() == 63
        assert np.abs(eight[name][0].astype(int)).max() == 127
        wide, narrow = (each.astype(np.float64) for each in (scales, eight[name][1]))
        np.testing.assert_allclose(wide, narrow * 127 / 63, rtol=rounding)


def input_scales(proto: onnx.ModelProto) -> dict[str, float]:
    scales = [tensor for tensor in proto.graph.initializer if tensor.name.endswith(".input.scale")]
    return {tensor.name: numpy_helper.to_array(tensor).item() for tensor in scales}


@pytest.mark.slow("graph")
def test_seven_bits_apply_only_to_int8_weights() -> None:
    own = made(Vit(), rest_precision="fp32")
    eight, seven = (own.graph("int8", scales="max", weight_bits=bits) for bits in (8, 7))
    assert input_scales(eight) == input_scales(seven)
    notes = [notes_of(proto) for proto in (eight, seven)]
    assert "export.weight_bits" not in notes[0]
    assert notes[1].pop("export.weight_bits") == "7"
    assert notes[0] == notes[1]
    fp8 = [own.graph("fp8", scales="max", weight_bits=bits).SerializeToString() for bits in (8, 7)]
    assert fp8[0] == fp8[1]
    assert weight_format(FORMATS["fp8"], 7) == FORMATS["fp8"]


@pytest.mark.parametrize("bits", [8, 7])
def test_sums_of_seven_bit_products_do_not_saturate(bits: int) -> None:
    """The largest inputs and weights of both signs have the exact sums 64 and -64."""
    if bits == 8 and has_vnni() is not False:
        pytest.skip("this CPU adds up INT8 products in 32 bits, or doesn't tell")
    weights = np.ones((64, 8), dtype=np.float32)
    weights[:, 4:] = -1.0
    plain = graph_of(
        '(float[batch,64] x) => (float[batch,8] y) { ["fc/MatMul"] y = MatMul(x, weights) }', ir=9, weights=weights
    )
    proto = quantise_graph(plain, FORMATS["int8"], {"fc/MatMul": 1.0}, weighted_layers(plain), weight_bits=bits)
    batch = np.ones((4, 64), dtype=np.float32)
    exact = batch @ weights
    fused = plain_session(proto)
    assert error(session_of(proto).run(None, {"x": batch})[0], exact) < 1e-6
    off = error(cast(Array, fused.run(None, {"x": batch})[0]), exact)
    assert off < 1e-6 if bits == 7 else off > 0.5


@pytest.mark.slow("graph")
def test_kept_modules_are_not_quantised() -> None:
    own = made(Vit(), rest_precision="fp32")
    some = own.graph("int8", keep=["blocks.1", "*.attn.proj"])
    assert {layer.module for layer in quantised_layers(own.fp32_graph, ["blocks.1", "*.attn.proj"])} == {
        "patch", "blocks.0.attn.qkv", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head"
    }  # fmt: skip
    batch = images(8, seed=7)
    exact = run(own.fp32_graph, batch)
    assert error(run(some, batch), exact) < error(run(own.graph("int8"), batch), exact)
    with pytest.raises(BadInput, match=r"'blocks.9' fits no layer .*those of this model are patch, blocks.0.attn.qkv"):
        own.graph("int8", keep=["blocks.9"])
    rejects("none of the 10 layers would be quantised", own.graph, "int8", keep=["*"])


def test_layers_with_the_same_input_share_a_qdq_pair() -> None:
    text = '["a/MatMul"] ya = MatMul(x, a) ["b/MatMul"] yb = MatMul(x, b) y = Add(ya, yb)'
    proto = graph_of(
        f"(float[batch,8] x) => (float[batch,8] y) {{ {text} }}", a=np.eye(8, dtype="f"), b=np.eye(8, dtype="f")
    )
    new = quantise_graph(proto, FORMATS["int8"], {"a/MatMul": 2.0, "b/MatMul": 2.0}, weighted_layers(proto))
    kinds = [node.op_type for node in new.graph.node]
    assert (kinds.count("QuantizeLinear"), kinds.count("DequantizeLinear")) == (1, 3)


def test_histogram_does_not_depend_on_the_batching() -> None:
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32) * np.float32(3)
    values[17] = 41.0
    whole, parts = Histogram(), Histogram()
    whole.add(values, "x")
    for part in np.split(np.sort(np.abs(values)), 10):
        parts.add(part, "x")
    assert np.array_equal(whole.counts, parts.counts)
    assert (whole.end, whole.largest) == (parts.end, parts.largest) == (64.0, 41.0)
    expected = np.bincount((np.abs(values) * np.float32(BINS / 64)).astype(int), minlength=BINS)
    assert np.array_equal(whole.counts, expected)
    rejects("x: the model gives NaN or Inf", whole.add, np.array([np.nan], np.float32), "x")


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_calibrated_range_has_the_least_square_error(precision: str) -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.standard_normal(20_000), [30.0]]).astype(np.float32)
    seen = Histogram()
    seen.add(values, "x")

    def loss(end: float) -> float:
        scale = end / {"int8": 127, "fp8": 448}[precision]
        if precision == "int8":
            new = np.clip(np.rint(values / scale), -127, 127) * scale
        else:
            new = np.clip(values / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
        return float(np.square(values - new).mean())

    chosen = clipping_range(seen, FORMATS[precision], "mse")
    best = min(loss(end) for end in np.linspace(0.5, 30, 400))
    assert loss(chosen) <= 1.05 * best
    assert loss(chosen) <= loss(30.0)
    assert clipping_range(seen, FORMATS[precision], "max") == 30.0
    assert clipping_range(seen, FORMATS[precision], "entropy") < 30.0
    assert clipping_range(Histogram(), FORMATS[precision], "mse") == 1.0


@pytest.mark.slow("graph")
def test_balancing_changes_only_ranges() -> None:
    model = Vit()
    with torch.no_grad():
        model.blocks[0].norm1.weight[3] = 40.0  # type: ignore[union-attr, operator]
    proto = export(model)
    places = balanceable_norms(proto, model)
    assert [place.norm for place in places] == [f"blocks.{at}.norm{one}" for at in (0, 1) for one in (1, 2)]
    largest = largest_by_channel(proto, [place.value for place in places], batches())
    batch = images(8, seed=3)
    with torch.no_grad():
        before = model(torch.from_numpy(batch)).numpy()
        balance_(model, places, largest)
        after = model(torch.from_numpy(batch)).numpy()
    assert error(after, before) < 1e-5
    new = export(model)
    spread = [sizes.max() / np.median(sizes) for sizes in (
        largest[places[0].value], largest_by_channel(new, [places[0].value], batches())[places[0].value]
    )]  # fmt: skip
    assert spread[1] < 0.4 * spread[0]


def test_balancing_strengths_equal_those_of_the_paper() -> None:
    largest = torch.tensor([1.0, 100.0, 0.0, 4.0])
    weights = [torch.tensor([[0.5, -0.25, 3.0, 0.0]]), torch.tensor([[-1.0, 0.04, 1.0, 0.0]])]
    scale = smoothing_scales(largest, weights)
    raw = torch.tensor([(1.0 / 1.0) ** 0.5, (100 / 0.25) ** 0.5], dtype=torch.float64)
    torch.testing.assert_close(scale[:2], raw / raw.log().mean().exp())
    assert scale[2] == scale[3] == 1.0


def test_layer_with_one_output_is_not_quantised() -> None:
    text = '["one/MatMul"] y = MatMul(x, one) ["several/MatMul"] z = MatMul(x, several)'
    one, several = (np.ones((6, width), np.float32) for width in (1, 4))
    proto = graph_of(f"(float[2,6] x) => (float y, float z) {{ {text} }}", one=one, several=several)
    assert [each.module for each in weighted_layers(proto)] == ["several"]


@pytest.mark.slow("graph")
def test_balancing_reduces_the_error_of_outliers() -> None:
    def spoilt() -> Vit:
        model = Vit()
        with torch.no_grad():
            for block in model.blocks:
                block.norm1.weight[3] = 100.0  # type: ignore[operator, union-attr]
                block.attn.qkv.weight[:, 3] /= 100.0  # type: ignore[index, operator, union-attr]
        return model

    batch = images(8, seed=3)
    plain, balanced = (made(spoilt(), rest_precision="fp32", balance=flag) for flag in (False, True))
    exact = run(plain.fp32_graph, batch)
    errors = [error(run(own.graph("int8"), batch), exact) for own in (plain, balanced)]
    assert errors[1] < 0.6 * errors[0]
