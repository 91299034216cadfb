"""Backbones with named outputs: their values, the reduction, directories, graphs and proofs that have them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from corp_deploy import load
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.families.family import output_ports, outputs_of, with_outputs
from corp_deploy.planning.probe import Probe
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.read_tokens import tokens_to_fit
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.inputs import model_digest
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.outputs import Outputs, outputs_from_text
from ground.errors import BadInput
from tests import hf_towers, timm_models, tiny
from tests.small_models import pixels, small

EVERY = (
    "pooled,class,registers,patches,tokens,block0,block1_norm,block0_class,block1_registers_norm,block1_tokens,"
    "map,block1_map_norm"
)


def backbone(**kwargs: Any) -> Checkpoint:
    return tiny.checkpoint(num_classes=0, reg_tokens=2, depth=3, **kwargs)


def given(model: nn.Module) -> dict[str, Tensor]:
    return given_of(model, torch.from_numpy(tiny.images(3)))


def given_of(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    with torch.inference_mode():
        answer = model(images)
    tensors = answer if isinstance(answer, tuple) else (answer,)
    return dict(zip([port.name for port in output_ports(model)], tensors, strict=True))


def test_each_output_is_what_timm_gives_there() -> None:
    dense = backbone().model
    assert isinstance(dense, VisionTransformer)
    model = with_outputs(dense, outputs_from_text(EVERY))
    images = torch.from_numpy(tiny.images(3))
    with torch.inference_mode():
        tokens = dense.forward_features(images)
        final = {"class": tokens[:, 0], "registers": tokens[:, 1:3], "patches": tokens[:, 3:], "tokens": tokens}
        raw: Any = dense.forward_intermediates(
            images, indices=[0, 1], return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
        )
        normed: Any = dense.forward_intermediates(
            images, indices=[1], return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True, norm=True
        )
        expected = {
            "pooled": dense(images), **final, "block0": raw[0][0], "block1_norm": normed[0][0],
            "block0_class": raw[0][1][:, 0], "block1_registers_norm": normed[0][1][:, 1:3],
            "block1_tokens": torch.cat([raw[1][1], raw[1][0]], dim=1),
            "map": tokens[:, 3:].reshape(3, 4, 4, 48).permute(0, 3, 1, 2),
            "block1_map_norm": normed[0][0].reshape(3, 4, 4, 48).permute(0, 3, 1, 2),
        }  # fmt: skip
    got = given(model)
    assert list(got) == EVERY.split(",")
    for name, tensor in got.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize(
    ("name", "names", "layers"),
    [
        ("convnext_atto", "patches,stage1,stage3", {"stage1": 1, "stage3": 3}),
        ("convnext_atto", "map,stage1_map,stage3_map", {"stage1_map": 1, "stage3_map": 3}),
        ("small_mixer", "patches,block0", {"block0": 0}),
    ],
)
def test_other_families_give_their_layers_too(name: str, names: str, layers: dict[str, int]) -> None:
    dense: Any = small(name, num_classes=0).model
    images = pixels(dense, 2)
    got = given_of(with_outputs(dense, outputs_from_text(names)), images)
    with torch.inference_mode():
        last = dense.forward_features(images)
        raw = dense.forward_intermediates(images, indices=list(layers.values()), intermediates_only=True)
    expected = {"patches": last, "map": last, **dict(zip(layers, raw, strict=True))}
    for each, tensor in got.items():
        reference = expected[each]
        if reference.ndim == 4 and not each.endswith("map"):
            reference = reference.flatten(2).mT
        torch.testing.assert_close(tensor, reference, rtol=1e-5, atol=1e-5)


def test_names_of_sites_and_weights_stay_and_nothing_is_counted_twice() -> None:
    dense = backbone().model
    model = with_outputs(dense, outputs_from_text("class,patches,block0"))
    assert outputs_of(dense) is None
    assert outputs_of(model) == Outputs(("class", "patches", "block0"))
    assert [site.name for site in traced_model.sites_of(model).every] == [
        site.name for site in traced_model.sites_of(dense).every
    ]
    assert model_digest(model) == model_digest(dense)
    assert macs(model) == macs(dense)
    assert with_outputs(dense, None) is dense


def test_what_stands_behind_the_last_output_is_no_part_of_the_model() -> None:
    model = with_outputs(backbone().model, outputs_from_text("block1"))
    assert {site.name.split(".")[1] for site in traced_model.sites_of(model).every} == {"0", "1"}


REFUSED = {
    "logits": "the model has no classifier; its head gives pooled",
    "class,class": "class twice",
    "nose": "'nose' is none; expected logits, pooled, class, registers, patches, tokens, map, or a layer such as",
    "class,block3": r"block3: the model has no such layer; it has block0, block1, block2",
    "": "'' is none",
}


@pytest.mark.parametrize("names", REFUSED)
def test_what_a_model_has_not_got_is_refused(names: str) -> None:
    with pytest.raises(BadInput, match=REFUSED[names]):
        with_outputs(backbone().model, outputs_from_text(names))


def test_tokens_and_stages_that_are_not_there_are_refused() -> None:
    averaged = tiny.checkpoint(num_classes=0, class_token=False, global_pool="avg").model
    with pytest.raises(BadInput, match="class: the model has no class token; its tokens are patch"):
        with_outputs(averaged, outputs_from_text("class"))
    with pytest.raises(BadInput, match="pooled is of one built with num_classes 0"):
        with_outputs(tiny.checkpoint().model, outputs_from_text("pooled"))
    with pytest.raises(BadInput, match="the model has no norm of tokens behind its last layer"):
        with_outputs(timm_models.checkpoint("tiny_vit", num_classes=0).model, outputs_from_text("patches,stage1_norm"))


def test_a_directory_keeps_its_outputs(tmp_path: Path) -> None:
    dense = backbone()
    model = with_outputs(dense.model, outputs_from_text("class,patches,block1"))
    save(replace(dense, model=model), tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model")
    assert outputs_of(loaded.model) == outputs_of(model)
    assert given(loaded.model).keys() == given(model).keys()
    for name, tensor in given(model).items():
        assert torch.equal(given(load(tmp_path / "model"))[name], tensor)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"block1"', '"block7"'))
    with pytest.raises(
        BadInput, match=r"block7: the model has no such layer; it has block0, block1, block2, .*; write the model again"
    ):
        load_checkpoint(tmp_path / "model")


def test_merged_tokens_are_given_back_and_dropped_ones_refused() -> None:
    dense = backbone().model
    outputs = outputs_from_text("class,patches,block0")
    merging = Merging(schedule=(3, 2, 0))
    merged = traced_model.with_merging(with_outputs(dense, outputs), merging)
    got = given(merged)
    for name, left in (("block0", 13), ("patches", 11)):
        assert got[name].shape == (3, 16, 48)
        assert [len(rows.unique(dim=0)) for rows in got[name]] == [left] * 3
    dropping = Merging(schedule=(3, 2, 0), how="drop")
    with pytest.raises(
        BadInput, match="class, patches, block0 have a vector for each patch, and those that were dropped"
    ):
        traced_model.with_merging(with_outputs(dense, outputs), dropping)


READ = {
    "class": [0],
    "patches": [*range(3, 19)],
    "class,block0": [0],
    "block2": [*range(3, 19)],
    "block2_norm,class": [0, *range(3, 19)],
}


@pytest.mark.parametrize("names", READ)
def test_tokens_that_outputs_have_or_are_made_of_count(names: str) -> None:
    model = with_outputs(backbone().model, outputs_from_text(names))
    for read in (tokens_to_fit(model), tokens_to_fit(model, "pooled")):
        assert read is not None
        assert read.tolist() == READ[names]


def mean_change(reduced: nn.Module, dense: nn.Module, images: Tensor) -> float:
    with torch.inference_mode():
        pairs = zip(reduced(images), dense(images), strict=True)
        changes = [float((new - old).double().norm() / old.double().norm()) ** 2 for new, old in pairs]
    return sum(changes) / len(changes)


def test_a_probe_weighs_all_outputs_alike(tmp_path: Path) -> None:
    dense = backbone()
    model = with_outputs(dense.model, outputs_from_text("class,patches,block0"))
    inputs = tiny.opened(tmp_path / "images.npy", tiny.images(96), model)
    moments = calibrate(replace(dense, model=model), inputs, batch_size=32)
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.0, align_hidden=8)
    method = replace(method, mlp_swaps=False)
    few = torch.from_numpy(tiny.images(8, seed=3))
    sites = ("blocks.0.mlp", "blocks.2.mlp")
    probe = Probe(model=model, moments=moments, method=method, inputs=few, eliminations={})
    trials = [(site, 48) for site in sites]
    exact, first_order = probe.effects(trials), probe.linear_effects(trials)
    for trial in trials:
        reduced = probe.narrowed(dict([trial]))
        change = mean_change(reduced, model, few)
        assert exact[trial] == pytest.approx(change, rel=1e-4)
        assert probe.effect(dict([trial])) == pytest.approx(change, rel=1e-4)
        # Three random directions estimate it to a factor, the class token's share among them.
        assert change / 4 < first_order[trial] < change * 4
    assert exact[trials[0]] > 0


def test_reductions_keep_the_outputs_and_a_closed_loop_lowers_the_error_of_tokens(tmp_path: Path) -> None:
    dense = backbone()
    model = with_outputs(dense.model, outputs_from_text("class,patches,block1"))
    inputs = tiny.opened(tmp_path / "images.npy", tiny.images(128), model)
    moments = calibrate(replace(dense, model=model), inputs, batch_size=32)
    held_out = torch.from_numpy(tiny.images(32, seed=9))
    half = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
    errors = {}
    for preset in ("none", "best"):
        reduction = reduce(model, moments, method_from_preset(preset, **half))
        assert outputs_of(reduction.model) == outputs_of(model)
        errors[preset] = mean_change(reduction.model, model, held_out)
    looped = reduce_traced(model, inputs, method_from_preset("best", **half), loop=Loop()).model
    errors["loop"] = mean_change(looped, model, held_out)
    assert errors["loop"] < errors["best"] < errors["none"], errors
    kept = reduce(model, moments, method_from_preset("best", mlp_sparsity=0.0, attention_sparsity=0.0))
    for name, tensor in given(model).items():
        torch.testing.assert_close(given(kept.model)[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        ("class,patches,block1", PolishOptions(how="model", steps=12, batch_size=8)),
        ("block2", PolishOptions(how="model", steps=12, batch_size=8)),
        ("class,patches,block1_map", PolishOptions(how="layer")),
    ],
)
def test_a_polish_lowers_the_errors_of_all_outputs(names: str, asked: PolishOptions, tmp_path: Path) -> None:
    dense = backbone()
    model = with_outputs(dense.model, outputs_from_text(names))
    inputs = tiny.opened(tmp_path / "images.npy", tiny.images(64), model)
    moments = calibrate(replace(dense, model=model), inputs, batch_size=32)
    reduced = reduce(model, moments, method_from_preset("best", mlp_sparsity=0.75, align_hidden=8)).model
    result = polished(model, reduced, inputs, asked)
    assert outputs_of(result.model) == outputs_of(model)
    assert result.report.error < result.report.error_before


def test_a_vision_tower_of_transformers_gives_its_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed, so that there are no models of it")
    theirs = hf_towers.write_tower(tmp_path / "hf", "Dinov2Model")
    outputs = outputs_from_text("class,patches")
    taken = load_dense(f"hf:{tmp_path / 'hf'}", weights=None, kwargs={}, outputs=outputs)
    images = torch.from_numpy(tiny.images(3))
    with torch.inference_mode():
        tokens = theirs(images).last_hidden_state
    got = given_of(taken.model, images)
    torch.testing.assert_close(got["class"], tokens[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got["patches"], tokens[:, 1:], rtol=1e-4, atol=1e-4)


@pytest.mark.slow("graph")
def test_a_graph_of_merged_tokens_has_a_vector_for_each_patch(tmp_path: Path) -> None:
    dense = tiny.checkpoint(num_classes=0)
    model = with_outputs(dense.model, outputs_from_text("class,patches,block0"))
    merged = traced_model.with_merging(model, Merging(schedule=(3, 0)))
    path = tmp_path / "model.onnx"
    export_checkpoint(replace(dense, model=merged), path, precision="fp32")
    assert not {"ScatterElements", "ScatterND"} & {node.op_type for node in onnx.load(str(path)).graph.node}
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for count in (1, 4):
        images = tiny.images(count, seed=count)
        got = session.run(None, {"images": images})
        expected = given_of(merged, torch.from_numpy(images))
        for (name, ours), theirs in zip(expected.items(), got, strict=True):
            assert theirs.shape == tuple(ours.shape)
            assert np.linalg.norm(theirs - ours.numpy()) < 1e-4 * float(ours.norm()), name
