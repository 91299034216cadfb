"""Locating the first block whose error exceeds its noise, and cutting graphs to read values inside them."""

import math

import numpy as np
import pytest
import torch
from onnx import ModelProto, TensorProto

from perf.parity import block_outputs
from perf.parity.locate import FaultLocation, compare_blocks, keep_until_it_passes, locate_fault
from perf.parity.rounding import rounded_graph
from tests.graphs import graph_of
from tests.refusals import rejects

ONES = np.ones((4, 3))


def test_first_block_above_its_noise_is_named() -> None:
    reference = {"a": ONES, "b": ONES, "c": ONES}
    candidate = {"a": ONES * 1.003, "b": ONES * 1.01, "c": ONES * 1.5}
    noise = {"a": 0.001, "b": 0.002, "c": 0.01}
    found = locate_fault(
        "fp16", compare_blocks(reference, candidate, noise=noise), activations={"b": 123.0}, fix_command="keep {site}"
    )
    assert (found.site, found.command, found.largest_activation) == ("b", "keep b", 123.0)
    assert found.value == pytest.approx(0.01)
    assert "5 times its noise 0.002" in found.reason
    assert "within float16's 65,504" in found.reason


def test_error_that_grows_with_the_noise_names_no_block() -> None:
    blocks = compare_blocks(
        {"a": ONES, "b": ONES}, {"a": ONES * 1.001, "b": ONES * 1.01}, noise={"a": 0.001, "b": 0.005}
    )
    found = locate_fault("fp16", blocks, activations={}, fix_command="keep {site}")
    assert (found.site, found.command) == (None, "")
    assert "b is nearest, 2 times" in found.reason


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_exceeds_any_noise(bad: float) -> None:
    spoilt = ONES.copy()
    spoilt[1, 1] = bad
    found = locate_fault("fp16", compare_blocks({"a:0": ONES}, {"a:0": spoilt}), activations={"a": 7e4})
    assert (found.site, found.measure, found.value) == ("a", "nonfinite", math.inf)
    assert "over float16's 65,504" in found.reason


def test_dense_model_that_breaks_in_fp16_widens_no_bound() -> None:
    found = locate_fault("fp16", compare_blocks({"a": ONES}, {"a": ONES * 2}, noise={"a": math.inf}), activations={})
    assert found.site == "a"


def test_mismatched_sides_are_refused() -> None:
    rejects("share no block", compare_blocks, {"a": ONES}, {"b": ONES})
    rejects(r"block a: got \(3, 3\), expected \(4, 3\)", compare_blocks, {"a": ONES}, {"a": ONES[:3]})


def located(site: str | None) -> FaultLocation:
    return FaultLocation(link="l", site=site, measure="relative_error", value=1.0, noise=0.1, largest_activation=0.0,
                   half_limit=65504.0, reason="", command="")  # fmt: skip


def test_sites_are_kept_in_fp32_one_by_one_until_parity_passes() -> None:
    sick = ["blocks.1.attn", "blocks.4.attn"]

    def attempt(kept: tuple[str, ...]) -> FaultLocation | None:
        left = [site for site in sick if site not in kept]
        return located(left[0]) if left else None

    assert keep_until_it_passes(attempt) == (tuple(sick), None)


def test_keeping_sites_ends_without_improvement() -> None:
    kept, left = keep_until_it_passes(lambda _: located("blocks.1.attn"))
    assert kept == ("blocks.1.attn",)
    assert left is not None
    assert keep_until_it_passes(lambda _: located(None))[0] == ()
    kept, left = keep_until_it_passes(lambda kept: located(f"blocks.{len(kept)}.mlp"), most=3)
    assert len(kept) == 3
    assert left is not None


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("blocks.3.attn.qkv/MatMul_1", "blocks.3.attn"),
        ("blocks.3.attn/MatMul", "blocks.3.attn"),
        ("blocks.3/Add_1", "blocks.3"),
        ("patch_embed.proj/Conv", "patch_embed"),
        ("head/Gemm", "head"),
        ("Concat", ""),
    ],
)
def test_node_maps_to_its_site(name: str, site: str) -> None:
    assert block_outputs.site_of(name) == site


def half_graph(weight: float, *, batch: str | int = "batch") -> ModelProto:
    """Build images -> float16 -> times weight (blocks.0.mlp) -> plus itself (blocks.0) -> times 0.001 (head)."""
    return graph_of(
        f"""(float[{batch},2] images) => (float[{batch},2] logits) {{
            ["Cast"] x = Cast<to=10>(images)
            ["blocks.0.mlp.fc1/Mul"] y = Mul(x, w)
            ["blocks.0.mlp/Identity"] y2 = Identity(y)
            ["blocks.0/Add"] z = Add(y2, y2)
            ["head/Mul"] u = Mul(z, s)
            ["head/Cast"] logits = Cast<to=1>(u)
        }}""",
        w=np.asarray(weight, np.float16), s=np.asarray(0.001, np.float16),
    )  # fmt: skip


IMAGES = np.arange(10, dtype=np.float32).reshape(5, 2) + np.float32(1 / 3)
FEEDS = {"images": IMAGES}


def test_cut_values_equal_float16_arithmetic() -> None:
    found = block_outputs.outputs_of_graph(half_graph(3.0), FEEDS, batch=2)
    assert list(found) == ["blocks.0.mlp", "blocks.0", "head"]
    y = IMAGES.astype(np.float16) * np.float16(3)
    np.testing.assert_array_equal(found["blocks.0.mlp"], y.astype(np.float32))
    np.testing.assert_array_equal(found["blocks.0"], (y + y).astype(np.float32))
    np.testing.assert_array_equal(found["head"], ((y + y) * np.float16(0.001)).astype(np.float32))


def test_float16_region_ends_at_its_cast() -> None:
    found = block_outputs.outputs_of_graph(half_graph(5000.0), FEEDS)
    assert np.isfinite(found["blocks.0.mlp"]).all()
    assert np.isinf(found["blocks.0"][IMAGES > 7]).all()


def test_fixed_batch_graph_takes_any_number_of_images() -> None:
    fixed = block_outputs.outputs_of_graph(half_graph(3.0, batch=2), FEEDS)
    free = block_outputs.outputs_of_graph(half_graph(3.0), FEEDS)
    assert fixed["head"].shape == (5, 2)
    np.testing.assert_array_equal(fixed["head"], free["head"])


def test_largest_activation_is_reported_per_site() -> None:
    model = half_graph(3.0)
    by_value = block_outputs.largest_activations(model, FEEDS, batch=2)
    top = float(np.float16(IMAGES.max()) * np.float16(3))
    assert by_value["y"] == top
    assert block_outputs.largest_by_site(model, by_value)["blocks.0"] == 2 * top
    assert block_outputs.find_fp16_values(model) == {"x", "y", "y2", "z", "u"}


def test_graphs_without_paths_or_with_fp16_inputs_are_refused() -> None:
    model = half_graph(3.0)
    for node in model.graph.node:
        node.name = node.name.replace("/", "_")
    rejects("no node of this graph is named by its module", block_outputs.site_outputs, model)
    model = half_graph(3.0)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    rejects("logits: this input or output is float16", rounded_graph, model)


def test_torch_hooks_record_sites_and_are_removed() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.nn.Linear(2, 2))
    found = block_outputs.outputs_of_module(model, FEEDS, batch=2)
    assert list(found) == ["0.0", "0.1", "0", "1"]
    with torch.inference_mode():
        np.testing.assert_allclose(found["1"], model(torch.from_numpy(IMAGES)).numpy(), rtol=1e-6)
    assert not any(module._forward_hooks for module in model.modules())
