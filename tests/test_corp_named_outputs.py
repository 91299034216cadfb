"""Backbones that give named outputs: tokens, stages and their maps, dense and reduced, whatever their library."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime as ort
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from corp_deploy import load
from corp_deploy.families import traced_model
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.counting import macs
from corp_deploy.families.family import answers, output_ports, outputs_of, steps_to_outputs, with_outputs
from corp_deploy.families.traced_model import traced
from corp_deploy.planning.probe import Probe
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.read_tokens import tokens_to_fit
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.inputs import images_for_model, model_digest
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.outputs import Outputs, outputs_from_text
from corp_deploy.traced.models.steps import StreamState
from ground.errors import BadInput
from tests import hf_towers, small_convnets, timm_models, tiny
from tests.command import invoked
from tests.refusals import rejects
from tests.small_models import pixels, small
from tests.traced_examples import DENSENET, PVT, checkpoint_of, images

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
    rejects(REFUSED[names], lambda: with_outputs(backbone().model, outputs_from_text(names)))


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


# Models of timm's that no family reads give maps and their head's output by name, dense and reduced.

NAMES = ("stage0_map", "feature1", "map", "logits")
SMALL: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 7
}  # fmt: skip
MAMBA = Architecture(
    name="mambaout_femto", kwargs={"dims": [16, 32], "depths": [1, 1], "num_classes": 7, "img_size": 32}
)


def named(architecture: Architecture, *names: str) -> Checkpoint:
    dense = checkpoint_of(architecture)
    return replace(dense, model=with_outputs(dense.model, Outputs(names)))


@pytest.mark.parametrize("architecture", [PVT, MAMBA], ids=lambda each: each.name)
def test_they_are_what_timm_takes(architecture: Architecture) -> None:
    """Maps have channels first, wherever the model has them; the last one is what the head reads."""
    model, pixels = named(architecture, *NAMES).model, torch.from_numpy(images(3, seed=1))
    plain = timm.create_model(architecture.name, **{k: v for k, v in architecture.kwargs.items() if k != "img_size"})
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        first, tokens, last, logits = model(pixels)
        maps = plain.eval().forward_intermediates(pixels)[1]  # type: ignore[operator]
        assert torch.equal(first, maps[0])
        assert torch.equal(tokens, maps[1].flatten(2).mT)
        torch.testing.assert_close(logits, plain(pixels))
    assert last.shape == maps[-1].shape
    assert outputs_of(model) == Outputs(NAMES)


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("architecture", "names"), [(PVT, NAMES), (DENSENET, ("feature1_map", "logits")), (MAMBA, ("stage1_map", "map"))]
)
def test_they_stay_in_what_is_reduced(architecture: Architecture, names: tuple[str, ...], tmp_path: Path) -> None:
    dense = named(architecture, *names)
    np.save(tmp_path / "calibration.npy", images(48, seed=1))
    moments = calibrate(dense, images_for_model(dense.model, tmp_path / "calibration.npy"), batch_size=16)
    aligned = {"align_hidden": 4, "align_head": 4, "align_conv": 4}
    half = method_from_preset("best", mlp_sparsity=0.5, conv_sparsity=0.5, **aligned)
    reduced = replace(dense, model=reduce(dense.model, moments, half).model)
    save(reduced, tmp_path / "reduced")
    loaded = load_checkpoint(tmp_path / "reduced")
    assert outputs_of(loaded.model) == Outputs(names)
    export_checkpoint(loaded, tmp_path / "reduced.onnx", precision="fp32")
    pixels = images(3, seed=2)
    given = onnxruntime.InferenceSession(tmp_path / "reduced.onnx").run(list(names), {"images": pixels})
    with torch.no_grad():
        expected, before = (each.model(torch.from_numpy(pixels)) for each in (loaded, dense))
    for got, wanted, was in zip(given, expected, before, strict=True):
        assert np.abs(got - wanted.numpy()).max() < 1e-4 * wanted.abs().max()
        assert 1e-4 < (wanted - was).norm() / was.norm() < 0.7


@pytest.mark.parametrize(
    ("name", "names", "kept"),
    [
        ("deit_tiny_distilled_patch16_224", "class,patches", {"class": [0], "patches": [*range(2, 18)]}),
        ("vit_small_patch16_dinov3", "class,patches", {"class": [0], "patches": [*range(5, 21)]}),
        ("beit_base_patch16_224", "class,patches", {"class": [0], "patches": [*range(1, 17)]}),
        ("cait_xxs24_224", "class,patches", {"class": [0], "patches": [*range(1, 17)]}),
        ("eva02_tiny_patch14_224", "tokens,class", {"tokens": [*range(17)], "class": [0]}),
        ("vit_relpos_small_patch16_rpn_224", "patches", {"patches": [*range(16)]}),
    ],
)
def test_every_kind_of_vit_gives_its_tokens(name: str, names: str, kept: dict[str, list[int]]) -> None:
    made: Any = timm.create_model(name, **SMALL).eval()
    tiny.enliven(made, 0)
    model, pixels = traced(made, Architecture(name=name, kwargs=SMALL)), torch.from_numpy(images(2, seed=1))
    with torch.no_grad():
        given = with_outputs(model, outputs_from_text(names))(pixels)
        tokens = made.forward_features(pixels)
    for each, got in zip(names.split(","), given if isinstance(given, tuple) else (given,), strict=True):
        wanted = tokens[:, kept[each]]
        torch.testing.assert_close(got, wanted[:, 0] if each == "class" else wanted, msg=each)


def test_a_class_token_that_comes_later_is_refused_before() -> None:
    made = timm.create_model("cait_xxs24_224", **SMALL)
    reason = "block0_class: the model has no class token there; its tokens are patch"
    with pytest.raises(BadInput, match=reason):
        with_outputs(
            traced(made, Architecture(name="cait_xxs24_224", kwargs=SMALL)), outputs_from_text("class,block0_class")
        )


def test_what_a_model_has_not_is_refused() -> None:
    model = dense_from_architecture(PVT)
    for asked, reason in (("stage7_map", "it has stage0, stage1, feature0, feature1"), ("pooled", "head gives logits")):
        rejects(reason, with_outputs, model, Outputs((asked,)))


def test_a_module_of_its_own_says_its_outputs_itself() -> None:
    own = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2))
    model = traced(own, Architecture(name="own", family="module"))
    rejects("a module of your own says them itself", with_outputs, model, Outputs(("map",)))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("vit_tiny_patch16_224", "block0_map,class,block1_norm,patches"),
        ("vit_tiny_patch16_224", "class,patches"),
        ("swin_tiny_patch4_window7_224", "stage0_map,pooled"),
    ],
)
def test_a_walk_by_steps_meets_every_output(name: str, names: str) -> None:
    """Behind each cut of the stream, as of a model of one output."""
    kwargs = SMALL | {"num_classes": 0}
    if "swin" in name:
        kwargs = {"img_size": 32, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 2), "window_size": 4}
        kwargs |= {"num_classes": 0}
    made = timm.create_model(name, **kwargs).eval()
    tiny.enliven(made, 0)
    dense = traced(made, Architecture(name=name, kwargs={"img_size": 32}))
    model, pixels = with_outputs(dense, outputs_from_text(names)), torch.from_numpy(images(3, seed=1))
    with torch.no_grad():
        walk = StreamState.of(traced_model.embedded(model, pixels), None)
        for step in steps_to_outputs(model):
            walk = walk.behind(step)
        for got, wanted in zip(answers(model, walk, pixels), model(pixels), strict=True):
            torch.testing.assert_close(got, wanted)
    assert [step.name for step in traced_model.steps(model)] == [step.name for step in traced_model.steps(dense)]


# Stages' maps [B,C,H,W] as named outputs: their values, and a ConvNeXt's through closed loop, graphs, proof and

OUTPUTS = ("stage0_map", "stage2_map", "map")


def test_a_swins_maps_are_what_timm_gives_by_rows_and_columns() -> None:
    kwargs = {"img_size": (64, 96), "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
    dense: Any = dense_from_architecture(
        Architecture(name="swin_tiny_patch4_window7_224", kwargs={**kwargs, "num_classes": 0})
    )
    tiny.enliven(dense, 0)
    images = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    model = with_outputs(dense, outputs_from_text("stage0_map,layer1_map,map"))
    with torch.inference_mode():
        got = model(images)
        raw = dense.forward_intermediates(images, indices=[0, 1], intermediates_only=True)
        last = dense.forward_features(images).permute(0, 3, 1, 2)
    for ours, theirs in zip(got, (*raw, last), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert got[0].shape == (2, 24, 16, 24), "rows are not columns"


@pytest.mark.parametrize(("name", "stage"), [("resnet18d", "layer{}"), ("regnety_002", "s{}")])
def test_a_convolutional_networks_stages_are_what_timm_gives(name: str, stage: str) -> None:
    """By their own names, which count from 1, and as stages."""
    dense: Any = small_convnets.checkpoint(name).model
    images, theirs = small_convnets.pixels(2), small_convnets.library(name)
    places = (1, 2, 3, 4)
    words = ",".join([*(f"{stage.format(place)}_map" for place in places), "map"])
    with torch.inference_mode():
        *got, last = with_outputs(dense, outputs_from_text(words))(images)
        again = with_outputs(dense, outputs_from_text(words.replace(stage.format(""), "stage")))(images)
        raw = theirs.forward_intermediates(images, intermediates_only=True)[1:]  # type: ignore[operator]
    for ours, other, exact in zip(got, again, raw, strict=False):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours, other)
    torch.testing.assert_close(last, raw[-1], rtol=1e-4, atol=1e-5)
    with pytest.raises(BadInput, match=f"has no such layer; it has (act1, )?{stage.format(1)}, {stage.format(2)}, "):
        with_outputs(dense, outputs_from_text("map,block3_map"))
    with pytest.raises(BadInput, match="no norm of tokens behind its last layer"):
        with_outputs(dense, outputs_from_text(f"map,{stage.format(1)}_norm"))


def test_a_stage_of_blocks_is_called_as_timm_calls_it() -> None:
    """timm's features of an EfficientNet are the last blocks of stages, blocks.0.0 and so on."""
    dense: Any = small_convnets.checkpoint("small_efficientnet").model
    images, heard = small_convnets.pixels(2), list[torch.Tensor]()
    dense.get_submodule("blocks.1").register_forward_hook(lambda _, __, out: heard.append(out))
    with torch.inference_mode():
        dense(images)
        got, _ = with_outputs(dense, outputs_from_text("block1_map,map"))(images)
    torch.testing.assert_close(got, heard[0], rtol=1e-5, atol=1e-5)


def test_patches_are_a_map_where_they_are_of_an_image() -> None:
    dense = tiny.checkpoint(num_classes=0, img_size=(32, 48)).model
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        patches, found = with_outputs(dense, outputs_from_text("patches,map"))(images)
    assert found.shape == (2, 48, 4, 6)
    for row in range(4):
        for column in range(6):
            assert torch.equal(found[:, :, row, column], patches[:, 6 * row + column])
    with pytest.raises(BadInput, match="stage1_map: the model has no such layer; it has block0, block1"):
        with_outputs(dense, outputs_from_text("map,stage1_map"))


@pytest.mark.slow("graph")
def test_a_convnexts_stages_go_through_closed_loop_graphs_proof_and_repository(tmp_path: Path) -> None:
    dense = small("convnext_atto", num_classes=0)
    save(dense, tmp_path / "dense")
    np.save(tmp_path / "images.npy", pixels(dense.model, 48).numpy())
    np.save(tmp_path / "held-out.npy", pixels(dense.model, 12, seed=5).numpy())
    model, images = ("--outputs", ",".join(OUTPUTS)), ("--images", tmp_path / "images.npy")
    invoked("calibrate", "--model", tmp_path / "dense", *images, "-o", tmp_path / "m.safetensors")
    reduced, graph = tmp_path / "reduced", tmp_path / "reduced" / "model.onnx"
    asked = ("--mlp", 0.5, "--align", "mlp=8", "--closed-loop", "-o", reduced)
    invoked("reduce", "--model", tmp_path / "dense", *model, "--moments", tmp_path / "m.safetensors", *images, *asked)
    assert [port.name for port in output_ports(load(reduced))] == list(OUTPUTS)
    invoked("export", "--model", reduced, "-o", graph, "--precision", "fp32,fp16")
    shapes = {
        value.name: [each.dim_value for each in value.type.tensor_type.shape.dim][1:]
        for value in onnx.load(str(graph)).graph.output
    }
    assert shapes == {"stage0_map": [16, 16, 16], "stage2_map": [32, 4, 4], "map": [40, 2, 2]}

    held_out = ("--images", tmp_path / "held-out.npy", "--batch", "1,5", "--max-error", 0.9)
    steps = (reduced, graph, reduced / "model.fp16.onnx")
    invoked("verify", tmp_path / "dense", *model, *steps, *held_out, "-o", tmp_path / "parity.json")
    links = {link["name"]: link for link in json.loads((tmp_path / "parity.json").read_text())["links"]}
    assert {link["output"] for link in links.values()} == set(OUTPUTS)
    assert all(link["measures"]["relative_error"] < 1e-4 for link in links.values() if link["kind"] == "exact")
    positions = links["reduced stage0_map"]["measures"]
    assert 0.3 < positions["token_cosine_q01"] < positions["token_cosine_mean"] < 1.0, "one vector a position"
    assert positions["tokens_compared"] == 1024

    invoked("package", tmp_path, "-o", tmp_path / "repository", "--name", "small")
    invoked("package", "lint", tmp_path / "repository")
    (config,) = (tmp_path / "repository").glob("small_cpu/config.pbtxt")
    assert "dims: [ 16, 16, 16 ]" in config.read_text().replace("[16, 16, 16]", "[ 16, 16, 16 ]")


@pytest.mark.parametrize("form", ["maxvit_tf", "coatnet", "tiny_vit", "efficientformer_v2", "hiera"])
def test_stages_of_hierarchies_are_maps_as_timm_has_them(form: str) -> None:
    dense = timm_models.checkpoint(form, num_classes=0).model
    theirs = timm_models.library(form, num_classes=0)
    images = timm_models.pixels(dense, 2)
    if form == "hiera":
        with pytest.raises(BadInput, match="block1: the model has no such layer; it has block0, block2"):
            with_outputs(dense, outputs_from_text("patches,block1"))
        with torch.inference_mode():
            raw: Any = theirs.forward_intermediates(images, indices=[-1], intermediates_only=True)  # type: ignore[operator]
            patches, last = with_outputs(dense, outputs_from_text("patches,block4_map"))(images)
        assert len(dense.get_submodule("blocks")) == 5  # type: ignore[arg-type]
        torch.testing.assert_close(last, raw[0], rtol=1e-4, atol=1e-4)
        assert patches.shape == (2, 4, last.shape[1])
        return
    stages: list[torch.Tensor] = []
    count = len(list(theirs.get_submodule("stages").children()))
    for index in range(count):
        theirs.get_submodule(f"stages.{index}").register_forward_hook(lambda _, __, out: stages.append(out))
    names = [f"stage{index}_map" for index in range(count)]
    with torch.inference_mode():
        theirs(images)
        got = with_outputs(dense, outputs_from_text(",".join([*names, "map"])))(images)
    for name, ours, expected in zip(names, got, stages, strict=False):
        channels_last = ours.shape != expected.shape
        torch.testing.assert_close(
            ours, expected.movedim(-1, 1) if channels_last else expected, rtol=1e-4, atol=1e-4, msg=name
        )
    assert len(got) == count + 1
