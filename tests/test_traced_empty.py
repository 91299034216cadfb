"""Sites that are removed whole and leave a constant, in saved models, graphs, engines, closed loops and budgets."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.images import Images
from calib.inputs import run_model
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import Reduction, reduce, uniform_widths
from corp_deploy.spec.merging import Merging
from corp_deploy.spec.widths import Widths
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.input_sets import texts_for_model
from corp_deploy.store.transformers_directory import load_transformers
from corp_deploy.traced.models.module import TracedModule
from corp_deploy.traced.models.narrowed_model import at_widths
from export.graph.to_onnx import save_onnx as save_graph
from tests import encoders, tiny
from tests.graphs import built, needs_rtx, session_of
from tests.refusals import rejects
from tests.test_export_merged import graph_of
from tests.traced_examples import PVT, checkpoint_of, images

MLP, VALUES = "stages.0.blocks.0.mlp", "stages.1.blocks.0.attn.v"
EMPTIED: Widths = {MLP: 0, VALUES: 0}
GIVEN = {MLP: f"{MLP}.fc2", VALUES: "stages.1.blocks.0.attn.proj"}
"""The layers whose outputs become constant."""


@cache
def dense() -> Checkpoint:
    checkpoint = checkpoint_of(PVT)
    checkpoint.model.requires_grad_(False)
    return checkpoint


@cache
def opened() -> Images:
    return tiny.opened(Path(mkdtemp()) / "images.npy", images(24, seed=0), dense().model)


@cache
def moments() -> Moments:
    return calibrate(dense(), opened(), batch_size=8)


def method(**changes: object) -> Method:
    return method_from_preset("best", **{"align_hidden": 8, "align_head": 4, **changes})


@cache
def emptied() -> Reduction:
    return reduce(dense().model, moments(), method(), widths=EMPTIED)


def outputs(model: nn.Module, count: int = 5) -> Tensor:
    return tiny.ran(model, images(count, seed=count))


def output_of(model: nn.Module, name: str, inputs: object) -> Tensor:
    """Return the output of a layer in float64."""
    outputs: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, __, out: outputs.append(out.double()))
    with torch.inference_mode():
        run_model(model, inputs)  # type: ignore[arg-type]
    handle.remove()
    return outputs[0]


def test_removed_site_leaves_the_mean_of_its_dense_output() -> None:
    """The mean is over all images and places."""
    state = emptied().model.state_dict()
    for name, layer in GIVEN.items():
        every = (output_of(dense().model, layer, image[None]) for image in torch.from_numpy(images(24, seed=0)))
        mean_O = torch.cat([each.reshape(-1, each.shape[-1]) for each in every]).mean(dim=0)
        torch.testing.assert_close(state[f"{layer}.bias"].double(), mean_O, rtol=1e-5, atol=1e-6)
        assert state[f"{layer}.weight"].shape == (len(mean_O), 0), name
    assert not any(name.startswith((f"{MLP}.fc1", "stages.1.blocks.0.attn.q.")) for name in state)
    assert all(each.width == 0 and each.error == pytest.approx(each.energy, rel=1e-9) for each in emptied().sites)


def test_removed_costs_equal_the_reported_ones() -> None:
    costs, sites = site_costs(dense().model, "macs"), sites_of(dense().model).by_name
    saved = costs.saved(sites.values(), EMPTIED)
    assert macs(emptied().model) <= macs(dense().model) - saved
    assert parameters(emptied().model) < parameters(dense().model)
    alone = reduce(dense().model, moments(), method(), widths={MLP: 0}).model
    assert macs(alone) == macs(dense().model) - site_costs(dense().model, "macs").now[MLP]


@pytest.mark.slow("graph")
def test_model_with_removed_sites_round_trips_and_exports(tmp_path: Path) -> None:
    model = emptied().model
    save(replace(dense(), model=model), tmp_path / "reduced")
    loaded = load_checkpoint(tmp_path / "reduced").model
    assert torch.equal(outputs(loaded), outputs(model))
    proto = graph_of(loaded)
    assert all(0 not in tensor.dims for tensor in proto.graph.initializer)
    session = session_of(proto)
    for count in (1, 5):
        got = session.run(None, {proto.graph.input[0].name: images(count, seed=count)})[0]
        np.testing.assert_allclose(got, outputs(model, count).numpy(), rtol=1e-4, atol=1e-5)
    again = replace(dense(), model=loaded)
    taken, half = calibrate(again, opened(), batch_size=8), method(mlp_sparsity=0.5, attention_sparsity=0.5)
    assert uniform_widths(loaded, half).keys() & {MLP, VALUES} == set()
    narrower = reduce(loaded, taken, half).model
    assert macs(narrower) < macs(loaded)
    save(replace(dense(), model=narrower), tmp_path / "again")
    assert torch.equal(outputs(load_checkpoint(tmp_path / "again").model), outputs(narrower))


@pytest.mark.parametrize("loop", [Loop(), None])
def test_closed_loops_leave_constants_too(loop: Loop | None) -> None:
    rest = {site.name: site.width // 2 for site in sites_of(dense().model).every if site.name.endswith("mlp")}
    widths = {**rest, **EMPTIED}
    looped = reduce_traced(dense().model, opened(), method(), widths=widths, loop=loop).model
    plain = reduce(dense().model, moments(), method(), widths=widths).model
    pixels = torch.from_numpy(images(24, seed=0))
    with torch.inference_mode():
        exact = dense().model(pixels)
        errors = [float((each(pixels) - exact).norm()) for each in (looped, plain)]
    assert macs(looped) == macs(plain)
    assert looped.state_dict()[f"{GIVEN[MLP]}.weight"].numel() == 0
    if loop is not None:
        assert errors[0] < errors[1], "later sites compensate for removed ones"


def test_polish_skips_removed_sites() -> None:
    options = PolishOptions(steps=2)
    assert outputs(polished(dense().model, emptied().model, opened(), options).model).isfinite().all()


@torch.no_grad()
def test_budget_removes_sites_without_effect_first() -> None:
    """An MLP and an attention with outputs near zero are the first to be removed whole."""
    planted = checkpoint_of(PVT)
    tiny.enliven(planted.model, 0)  # so that all other sites matter
    for layer in GIVEN.values():
        planted.model.get_parameter(f"{layer}.weight").mul_(1e-4)
    planted.model.requires_grad_(False)
    taken = calibrate(planted, opened(), batch_size=8)
    for empties in (True, False):
        asked = replace(
            build_request(ReduceOptions(macs=0.65)),
            method=method(mlp_sparsity=0.0, attention_sparsity=0.0, empties=empties),
        )
        reduction, _ = reduce_as_asked(planted, taken, asked, images=opened())
        model = reduction.model
        assert isinstance(model, TracedModule)
        names = {site.name for site in sites_of(model).every}
        assert (MLP not in names, VALUES not in names) == (empties, empties)
        assert macs(model) <= 0.65 * macs(planted.model)


@pytest.mark.parametrize("name", ["stages.0.blocks.0.attn.v", "stages.1.blocks.0.attn.qk"])
def test_sites_that_cannot_be_removed_whole_are_refused(name: str, tmp_path: Path) -> None:
    """They are values whose keys come from a convolution, and queries and keys whose values stay."""
    rejects(f"{name}: it keeps nothing, but can't be removed completely", at_widths, dense().model, {name: 0})
    save(replace(dense(), model=emptied().model), tmp_path / "edited")
    config = json.loads((tmp_path / "edited/config.json").read_text(encoding="utf-8"))
    config["sites"] = {key: {"groups": each["groups"]} for key, each in config["sites"].items()}
    config["sites"][name]["kept"] = []
    (tmp_path / "edited/config.json").write_text(json.dumps(config), encoding="utf-8")
    rejects(f"config.json: {name}: it keeps nothing.*the file was edited", load_checkpoint, tmp_path / "edited")


# A ViT and a text encoder

OF_VIT: Widths = {"blocks.0.mlp": 0, "blocks.1.attn.v": 0}
OF_TEXT: Widths = {"encoder.layer.0.dense": 0, "encoder.layer.1.attention.v": 0}
GIVEN_OF_TEXT = ("encoder.layer.0.output.dense", "encoder.layer.1.attention.output.dense")
GIVEN_OF_VIT = {"blocks.0.mlp": "blocks.0.mlp.fc2", "blocks.1.attn.v": "blocks.1.attn.proj"}


@cache
def vit() -> Reduction:
    dense = tiny.checkpoint()
    fitted, judges = (
        calibrate(dense, tiny.opened(Path(mkdtemp()) / "images.npy", tiny.images(count, seed)), batch_size=8)
        for count, seed in ((24, 0), (8, 5))
    )
    return reduce(dense.model, fitted, method(align_hidden=32), widths=OF_VIT, held_out=judges)


def test_constants_are_judged_on_other_inputs() -> None:
    for report in vit().sites:
        given_BNC = output_of(tiny.checkpoint().model, GIVEN_OF_VIT[report.site], torch.from_numpy(tiny.images(8, 5)))
        constant_C = vit().model.get_parameter(f"{GIVEN_OF_VIT[report.site]}.bias").double()
        assert report.held_out is not None
        expected = float((given_BNC - constant_C).square().sum(dim=-1).mean())
        assert report.held_out.error == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("metric", ["stream", "keys"])
def test_token_merging_works_with_removed_sites(metric: str) -> None:
    """A block without attention has no keys to compare tokens by, and no place to merge at."""
    model = vit().model
    merged = traced_model.with_merging(model, Merging(schedule=(2,), metric=metric))  # type: ignore[arg-type]
    with torch.inference_mode():
        assert merged(torch.from_numpy(tiny.images(2))).isfinite().all()


@pytest.mark.slow("graph", "engine")
@needs_rtx
def test_engine_is_built_with_removed_sites(tmp_path: Path) -> None:
    save_graph(graph_of(vit().model, "fp16"), tmp_path / "model.onnx")
    record = built(tmp_path / "model.onnx", "1:8:16")
    assert record.attention_sites == record.fused_attention_sites == ("blocks.0.attn",)


@pytest.mark.slow("graph")
def test_text_encoder_averages_constants_over_real_tokens(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path / "hub")
    checkpoint = load_transformers(tmp_path / "hub", {"normalize": False})
    (tmp_path / "t.txt").write_text("\n".join(encoders.texts(20)), encoding="utf-8")
    texts = texts_for_model(checkpoint.model, tmp_path / "t.txt")
    taken = calibrate(checkpoint, texts, batch_size=8)
    model = reduce(checkpoint.model, taken, method(align_hidden=32), widths=OF_TEXT).model
    (tokens,) = texts.batches(20)
    is_there = tokens["attention_mask"].bool()
    for name in GIVEN_OF_TEXT:
        mean_C = output_of(checkpoint.model, name, tokens)[is_there].mean(dim=0)
        torch.testing.assert_close(model.get_parameter(f"{name}.bias").double(), mean_C, rtol=1e-4, atol=1e-5)
    save(replace(checkpoint, model=model, lineage={}), tmp_path / "reduced")
    session = session_of(graph_of(model))
    with torch.inference_mode():
        expected = run_model(model, tokens)
        assert torch.equal(run_model(load_checkpoint(tmp_path / "reduced").model, tokens), expected)
    (got,) = session.run(None, {name: tensor.numpy() for name, tensor in tokens.items()})
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_removable_sites_are_reported() -> None:
    sites = sites_of(dense().model).every
    whole = {site.name for site in sites if site.whole_removal is not None}
    assert {MLP, VALUES} <= whole
    assert not any(site.name.endswith((".qk", ".stream")) for site in sites if site.whole_removal is not None)
