"""Sites of which a constant stays: against means computed image by image, saved, exported, built, and in a budget."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from calib.images import Images
from calib.inputs import run_model
from calib.moments import Moments
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.merging import Merging
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.families.site_cost import site_costs
from corp_deploy.families.widths import EMPTY_HEADS, Widths
from corp_deploy.planning.carry_out import reduce_as_asked
from corp_deploy.planning.request import Budget, ReductionRequest
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce, uniform_widths
from corp_deploy.reduction.symmetric_loop import reduce_symmetric_loop
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.inputs import images_for_model, texts_for_model
from corp_deploy.store.transformers_directory import load_transformers
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from export.graph.to_onnx import onnx_from_model
from export.graph.to_onnx import save as save_graph
from ground.errors import BadInput
from tests import encoders, tiny
from tests.graphs import needs_rtx

METHOD = method_from_preset("best", align_hidden=32, align_head=8)
EMPTIED: Widths = {"blocks.0.mlp": 0, "blocks.1.attn": EMPTY_HEADS}


@cache
def dense() -> Checkpoint:
    checkpoint = tiny.checkpoint()
    checkpoint.model.requires_grad_(False)
    return checkpoint


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Images:
    path = tmp_path_factory.mktemp("empty") / "images.npy"
    np.save(path, tiny.images(24))
    return images_for_model(dense().model, path)


@pytest.fixture(scope="module")
def moments(opened: Images) -> Moments:
    return calibrate(dense(), opened, batch_size=8)


@pytest.fixture(scope="module")
def emptied(moments: Moments) -> Reduction:
    return reduce(dense().model, moments, METHOD, widths=EMPTIED)


def mean_given(model: nn.Module, name: str, pixels: torch.Tensor) -> torch.Tensor:
    """The mean over images and tokens of what a layer gives, in float64."""
    given: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, __, out: given.append(out.double()))
    for image in pixels:
        model(image.unsqueeze(0))
    handle.remove()
    return torch.cat([out[0] for out in given]).mean(dim=0)


@pytest.mark.parametrize("name", list(EMPTIED))
def test_the_mean_of_what_the_dense_layer_gives_stays(name: str, emptied: Reduction) -> None:
    pixels = torch.from_numpy(tiny.images(24))
    expected = mean_given(dense().model, name, pixels)
    layer = emptied.model.get_submodule(name)
    given = layer(torch.randn(2, 17, 48))
    assert given.shape == (2, 17, 48)
    torch.testing.assert_close(given.double(), expected.expand(2, 17, 48), rtol=1e-5, atol=1e-5)


def test_all_variance_is_reported_lost(emptied: Reduction, moments: Moments) -> None:
    for report in emptied.sites:
        assert report.width == 0
        assert report.error == report.energy > 0.0
        assert report.r2 == 0.0


def test_other_inputs_judge_the_constant(emptied: Reduction, moments: Moments, tmp_path: Path) -> None:
    path = tmp_path / "others.npy"
    np.save(path, tiny.images(8, seed=5))
    others = calibrate(dense(), images_for_model(dense().model, path), batch_size=8)
    judged = reduce(dense().model, moments, METHOD, widths=EMPTIED, held_out=others)
    for report in judged.sites:
        given: list[torch.Tensor] = []
        layer = dense().model.get_submodule(report.site)
        handle = layer.register_forward_hook(lambda _, __, out, given=given: given.append(out.double()))
        with torch.inference_mode():
            dense().model(torch.from_numpy(np.load(path)))
        handle.remove()
        constant = judged.model.get_submodule(report.site)(torch.zeros(1, 1, 48)).double()
        assert report.held_out is not None
        expected = float((given[0] - constant).square().sum(dim=-1).mean())
        assert report.held_out.error == pytest.approx(expected, rel=1e-4)


def test_cost_by_formula_is_that_counted(emptied: Reduction) -> None:
    for currency, count in (("macs", macs), ("params", parameters)):
        costs = site_costs(dense().model, currency)  # type: ignore[arg-type]
        sites = sites_of(dense().model).by_name
        saved = sum(costs.now[name] - costs.of(sites[name], width, "padded") for name, width in EMPTIED.items())
        assert count(emptied.model) == count(dense().model) - saved


def test_saved_and_loaded_it_gives_the_same(emptied: Reduction, tmp_path: Path) -> None:
    save(replace(dense(), model=emptied.model, lineage={}), tmp_path / "reduced")
    pixels = torch.from_numpy(tiny.images(3, seed=1))
    loaded = load_checkpoint(tmp_path / "reduced").model
    with torch.inference_mode():
        assert torch.equal(loaded(pixels), emptied.model(pixels))


def graph_of(model: nn.Module, precision: str = "fp32"):  # type: ignore[no-untyped-def]
    ports = family_of(model).input_spec(model).ports, family_of(model).output_ports(model)
    return onnx_from_model(family_of(model).exportable(model), *ports, precision=precision, metadata={})


@pytest.mark.parametrize("widths", [EMPTIED, {"blocks.0.attn": EMPTY_HEADS, "blocks.0.mlp": 0}])
def test_a_graph_gives_torchs_outputs_at_any_batch(widths: Widths, moments: Moments) -> None:
    model = reduce(dense().model, moments, METHOD, widths=widths).model
    proto = graph_of(model)
    assert all(0 not in tensor.dims for tensor in proto.graph.initializer)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for count in (1, 5):
        pixels = tiny.images(count, seed=count)
        with torch.inference_mode():
            expected = model(torch.from_numpy(pixels)).numpy()
        np.testing.assert_allclose(session.run(None, {"images": pixels})[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow("graph", "engine")
@needs_rtx
def test_an_engine_is_built_of_it(emptied: Reduction, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    save_graph(graph_of(emptied.model, "fp16"), path)
    options = BuildOptions(backend="tensorrt-rtx", profiles=(BatchProfile.from_text("1:8:16"),), sms=("86",))
    record = build_engine(path, options).record
    assert record.attention_sites == record.fused_attention_sites == ("blocks.0.attn",)


@pytest.mark.parametrize("loop", ["asymmetric", "symmetric"])
def test_a_closed_loop_leaves_a_constant_too(loop: str, opened: Images, moments: Moments) -> None:
    way = reduce_closed_loop if loop == "asymmetric" else reduce_symmetric_loop
    widths = {**EMPTIED, "blocks.0.attn": sites_of(dense().model).by_name["blocks.0.attn"].width, "blocks.1.mlp": 96}
    reduced = way(dense().model, opened, METHOD, widths=widths).model
    layer = reduced.get_submodule("blocks.1.attn")
    one, other = layer(torch.randn(1, 5, 48)), layer(torch.randn(1, 5, 48))
    assert torch.equal(one, other)
    pixels = torch.from_numpy(tiny.images(24))
    opened_loop = reduce(dense().model, moments, METHOD, widths=widths).model
    with torch.inference_mode():
        exact = dense().model(pixels)
        errors = [float((model(pixels) - exact).norm()) for model in (reduced, opened_loop)]
    if loop == "asymmetric":
        assert errors[0] < errors[1], "later sites make up for what is gone"


@pytest.mark.parametrize("how", ["layer", "block", "model"])
def test_a_polish_passes_by_what_is_no_layer(how: str, emptied: Reduction, opened: Images) -> None:
    options = PolishOptions(how=how, steps=2, batch_size=4)  # type: ignore[arg-type]
    polish = polished(dense().model, emptied.model, opened, options)
    assert polish.model.get_submodule("blocks.1.attn")(torch.zeros(1, 2, 48)).isfinite().all()
    with torch.inference_mode():
        assert polish.model(torch.from_numpy(tiny.images(2))).isfinite().all()


def test_merging_by_keys_needs_keys(emptied: Reduction) -> None:
    with pytest.raises(BadInput, match=r"blocks\.1\.attn is a constant"):
        vit.with_merging(emptied.model, Merging(schedule=(2, 2), metric="keys"))
    merged = vit.with_merging(emptied.model, Merging(schedule=(2, 2)))
    with torch.inference_mode():
        assert merged(torch.from_numpy(tiny.images(2))).isfinite().all()


@torch.no_grad()
def test_a_budget_leaves_a_constant_of_what_does_nothing(opened: Images) -> None:
    """An MLP and an attention whose last layers give nearly nothing are the first to go, whole."""
    planted = tiny.checkpoint()
    for name in ("blocks.0.mlp.fc2", "blocks.1.attn.proj"):
        planted.model.get_parameter(f"{name}.weight").mul_(1e-4)
    planted.model.requires_grad_(False)
    moments = calibrate(planted, opened, batch_size=8)
    for keys in (False, True):
        method = replace(METHOD, mlp_sparsity=0.0, attention_sparsity=0.0, empties=not keys)
        asked = ReductionRequest(preset="best", method=method, budget=Budget(currency="macs", share=0.55))
        reduction, _ = reduce_as_asked(planted, moments, asked, images=opened)
        widths = {site.name: site.width for site in sites_of(reduction.model).every}
        assert (widths["blocks.0.mlp"] == 0, widths["blocks.1.attn"] == EMPTY_HEADS) == (not keys, not keys)


def test_what_is_left_of_it_can_be_reduced_again(emptied: Reduction, opened: Images) -> None:
    """Constants are passed by: nothing listens there, no width is asked of them, no time is measured."""
    again = replace(dense(), model=emptied.model, lineage={})
    moments = calibrate(again, opened, batch_size=8)
    assert moments.sites.keys() == {"blocks.0.attn", "blocks.1.mlp"}
    half = replace(METHOD, mlp_sparsity=0.5, attention_sparsity=0.5)
    assert uniform_widths(again.model, half).keys() == moments.sites.keys()
    asked = ReductionRequest(preset="best", method=METHOD, budget=Budget(currency="macs", share=0.7))
    for request in (replace(asked, budget=None, method=half), asked, replace(asked, closed_loop="asymmetric")):
        reduction, _ = reduce_as_asked(again, moments, request, images=opened)
        widths = {site.name: site.width for site in sites_of(reduction.model).every}
        assert {name: widths[name] for name in EMPTIED} == EMPTIED
        assert macs(reduction.model) < macs(again.model)


@pytest.mark.slow("graph")
def test_a_text_encoder_keeps_constants_of_the_tokens_that_are_there(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path / "hub")
    checkpoint = load_transformers(tmp_path / "hub", {"normalize": False})
    (tmp_path / "t.txt").write_text("\n".join(encoders.texts(20)), encoding="utf-8")
    texts = texts_for_model(checkpoint.model, tmp_path / "t.txt")
    statistics = calibrate(checkpoint, texts, batch_size=8)
    widths: Widths = {"blocks.0.mlp": 0, "blocks.1.attn.v": 0}
    model = reduce(checkpoint.model, statistics, METHOD, widths=widths).model
    (tokens,) = texts.batches(20)
    is_there = tokens["attention_mask"].bool()
    for name in ("blocks.0.mlp.fc2", "blocks.1.attn.proj"):
        given: list[torch.Tensor] = []
        handle = checkpoint.model.get_submodule(name).register_forward_hook(lambda _, __, out, g=given: g.append(out))
        with torch.inference_mode():
            run_model(checkpoint.model, tokens)
        handle.remove()
        mean_C = given[0].double()[is_there].mean(dim=0)
        torch.testing.assert_close(model.get_parameter(f"{name}.bias").double(), mean_C, rtol=1e-4, atol=1e-5)
    save(replace(checkpoint, model=model, lineage={}), tmp_path / "reduced")
    session = ort.InferenceSession(graph_of(model).SerializeToString(), providers=["CPUExecutionProvider"])
    with torch.inference_mode():
        expected = run_model(model, tokens)
        assert torch.equal(run_model(load_checkpoint(tmp_path / "reduced").model, tokens), expected)
    (got,) = session.run(None, {name: tensor.numpy() for name, tensor in tokens.items()})
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-4, atol=1e-5)
