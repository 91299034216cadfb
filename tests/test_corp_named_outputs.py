"""Backbones with named outputs: tokens, stages and feature maps of dense, reduced and exported models."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
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
from corp_deploy.families.counting import macs
from corp_deploy.families.family import named_outputs_of, output_ports, with_outputs
from corp_deploy.families.traced_model import outputs_of_walk, steps_to_outputs, trace_model, tracing
from corp_deploy.planning.probe import Probe
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.read_tokens import counts_all, find_read_places
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.spec.outputs import NamedOutputs, outputs_from_text
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.input_sets import images_for_model, model_digest
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.steps import StreamState
from tests import hf_towers, small_convnets, timm_models, tiny
from tests.refusals import rejects
from tests.small_models import pixels, small
from tests.traced_examples import DENSENET, PVT, checkpoint_of, images

ALL_NAMES = (
    "pooled,class,registers,patches,tokens,block0,block1_norm,block0_class,block1_registers_norm,block1_tokens,"
    "map,block1_map_norm"
)
NAMES = ("stage0_map", "feature1", "map", "logits")
SMALL: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 7
}  # fmt: skip
MAMBA = Architecture(
    name="mambaout_femto", kwargs={"dims": [16, 32], "depths": [1, 1], "num_classes": 7, "img_size": 32}
)


def outputs_by_name(model: nn.Module, images: Tensor | None = None) -> dict[str, Tensor]:
    with torch.inference_mode():
        answer = model(torch.from_numpy(tiny.images(3)) if images is None else images)
    tensors = answer if isinstance(answer, tuple) else (answer,)
    return dict(zip([port.name for port in output_ports(model)], tensors, strict=True))


def test_each_named_output_equals_timms() -> None:
    dense = VIT().model
    assert isinstance(dense, VisionTransformer)
    model = with_names(dense, ALL_NAMES)
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
    got = outputs_by_name(model)
    assert list(got) == ALL_NAMES.split(",")
    for name, tensor in got.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-5), name


def test_naming_outputs_keeps_site_names_weights_and_macs() -> None:
    dense = VIT().model
    model = with_names(dense, "class,patches,block0")
    assert named_outputs_of(dense) is None
    assert named_outputs_of(model) == NamedOutputs(("class", "patches", "block0"))
    assert [site.name for site in traced_model.sites_of(model).every] == [
        site.name for site in traced_model.sites_of(dense).every
    ]
    assert model_digest(model) == model_digest(dense)
    assert macs(model) == macs(dense)
    assert with_outputs(dense, None) is dense
    assert {site.name.split(".")[1] for site in traced_model.sites_of(with_names(dense, "block1")).every} == {"0", "1"}


def traced_timm(name: str, **kwargs: Any) -> nn.Module:
    """Build a timm model whose weights are large enough to matter, with its program."""
    made = timm.create_model(name, **kwargs).eval()
    tiny.enliven(made, 0)
    return trace_model(made, Architecture(name=name, kwargs=kwargs))


def with_names(dense: nn.Module, names: str) -> nn.Module:
    return with_outputs(dense, outputs_from_text(names))


VIT = partial(tiny.checkpoint, num_classes=0, reg_tokens=2, depth=3)
RESNET, REGNET = (partial(small_convnets.checkpoint, name) for name in ("resnet18d", "regnety_002"))
REFUSED: list[tuple[Callable[[], Checkpoint], str, str]] = [
    (VIT, "logits", "the model has no classifier; its head gives pooled"),
    (VIT, "class,class", "class twice"),
    (VIT, "nose", "got 'nose', expected logits, pooled, class, registers, patches, tokens, map, or a layer such as"),
    (VIT, "class,block3", "block3: the model has no such layer; it has block0, block1, block2"),
    (VIT, "", "got ''"),
    (tiny.checkpoint, "pooled", "pooled is the output of one built with num_classes 0"),
    (
        partial(tiny.checkpoint, num_classes=0, class_token=False, global_pool="avg"),
        "class",
        "class: the model has no class token; its tokens are patch",
    ),
    (
        partial(timm_models.checkpoint, "tiny_vit", num_classes=0),
        "patches,stage1_norm",
        "the model has no norm of tokens after its last layer",
    ),
    (partial(checkpoint_of, PVT), "pooled", "head gives logits"),
    (RESNET, "map,block3_map", "has no such layer; it has act1, layer1, layer2, "),
    (
        partial(timm_models.checkpoint, "hiera", num_classes=0),
        "patches,block1",
        "block1: the model has no such layer; it has block0, block2",
    ),
]


@pytest.mark.parametrize(("build", "names", "message"), REFUSED)
def test_outputs_a_model_lacks_are_refused(build: Callable[[], Checkpoint], names: str, message: str) -> None:
    rejects(message, with_names, build().model, names)


def test_outputs_a_program_lacks_are_refused() -> None:
    """CaiT appends its class token behind block 0, and a user's module declares its own outputs."""
    cait = traced_timm("cait_xxs24_224", **SMALL)
    message = "block0_class: the model has no class token there; its tokens are patch"
    rejects(message, with_names, cait, "class,block0_class")
    own = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2))
    model = trace_model(own, Architecture(name="own", family="module"))
    rejects("a module of your own declares them", with_names, model, "map")


def test_saved_model_keeps_its_outputs(tmp_path: Path) -> None:
    dense = VIT()
    model = with_names(dense.model, "class,patches,block1")
    save(replace(dense, model=model), tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model")
    assert named_outputs_of(loaded.model) == named_outputs_of(model)
    assert outputs_by_name(loaded.model).keys() == outputs_by_name(model).keys()
    for name, tensor in outputs_by_name(model).items():
        assert torch.equal(outputs_by_name(load(tmp_path / "model"))[name], tensor)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"block1"', '"block7"'))
    message = r"block7: the model has no such layer; it has block0, block1, block2, .*; write the model again"
    rejects(message, load_checkpoint, tmp_path / "model")


def test_merged_tokens_are_unmerged_and_dropped_ones_refused() -> None:
    model = with_names(VIT().model, "class,patches,block0")
    got = outputs_by_name(traced_model.with_merging(model, Merging(schedule=(3, 2, 0))))
    for name, left in (("block0", 13), ("patches", 11)):
        assert got[name].shape == (3, 16, 48)
        assert [len(rows.unique(dim=0)) for rows in got[name]] == [left] * 3
    message = "class, patches, block0 have a vector for each patch, and those that were dropped"
    rejects(message, traced_model.with_merging, model, Merging(schedule=(3, 2, 0), how="drop"))


TOKENS_READ = {
    "class": [0],
    "patches": [*range(3, 19)],
    "class,block0": [0],
    "block2": [*range(3, 19)],
    "block2_norm,class": [0, *range(3, 19)],
}


@pytest.mark.parametrize("names", TOKENS_READ)
def test_fit_counts_the_tokens_outputs_contain(names: str) -> None:
    model = with_names(VIT().model, names)
    places = find_read_places(tracing(model), torch.device("cpu"))
    (read_P,) = [each for node, each in places.items() if node.all_input_nodes[1].target == "blocks.2.mlp.fc2.weight"]
    assert read_P.nonzero().flatten().tolist() == TOKENS_READ[names]
    assert not counts_all(model, None)


def mean_change(reduced: nn.Module, dense: nn.Module, images: Tensor) -> float:
    with torch.inference_mode():
        pairs = zip(reduced(images), dense(images), strict=True)
        changes = [float((new - old).double().norm() / old.double().norm()) ** 2 for new, old in pairs]
    return sum(changes) / len(changes)


def test_probe_weights_all_outputs_equally(tmp_path: Path) -> None:
    dense = VIT()
    model = with_names(dense.model, "class,patches,block0")
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
        assert probe.effect_of(probe.narrowed(dict([trial]))) == pytest.approx(change, rel=1e-4)
        # Three random directions estimate the change, the class token's share included, to a factor of 4.
        assert change / 4 < first_order[trial] < change * 4
    assert exact[trials[0]] > 0


@pytest.mark.slow("models")
@pytest.mark.parametrize(
    ("names", "loop", "asked"),
    [
        ("class,patches,block1", Loop(), PolishOptions(steps=1)),
        ("class,patches,block1_map", None, PolishOptions()),
    ],
)
def test_loops_and_polish_lower_the_errors_of_all_outputs(
    names: str, loop: Loop | None, asked: PolishOptions, tmp_path: Path
) -> None:
    dense = VIT()
    model, shown = with_names(dense.model, names), torch.from_numpy(tiny.images(64))
    inputs = tiny.opened(tmp_path / "images.npy", shown.numpy(), model)
    method = method_from_preset("best", mlp_sparsity=0.75, align_hidden=8)
    reduced = reduce(model, calibrate(replace(dense, model=model), inputs, batch_size=32), method).model
    if loop:
        looped = reduce_traced(model, inputs, method, loop=loop).model
        assert mean_change(looped, model, shown) < mean_change(reduced, model, shown)
        reduced = looped
    result = polished(model, reduced, inputs, asked)
    assert named_outputs_of(reduced) == named_outputs_of(result.model) == named_outputs_of(model)
    assert result.report.error < result.report.error_before


def test_transformers_vision_tower_gives_its_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed, so that there are no models of it")
    theirs = hf_towers.write_tower(tmp_path / "hf", "Dinov2Model")
    outputs = outputs_from_text("class,patches")
    taken = load_dense(f"hf:{tmp_path / 'hf'}", weights=None, kwargs={}, outputs=outputs)
    images = torch.from_numpy(tiny.images(3))
    with torch.inference_mode():
        tokens = theirs(images).last_hidden_state
    got = outputs_by_name(taken.model, images)
    torch.testing.assert_close(got["class"], tokens[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got["patches"], tokens[:, 1:], rtol=1e-4, atol=1e-4)


@pytest.mark.slow("graph")
def test_graph_with_merged_tokens_has_a_vector_per_patch(tmp_path: Path) -> None:
    dense = tiny.checkpoint(num_classes=0)
    model = with_names(dense.model, "class,patches,block0")
    merged = traced_model.with_merging(model, Merging(schedule=(3, 0)))
    path = tmp_path / "model.onnx"
    export_checkpoint(replace(dense, model=merged), path, precision="fp32")
    assert not {"ScatterElements", "ScatterND"} & {node.op_type for node in onnx.load(str(path)).graph.node}
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for count in (1, 4):
        images = tiny.images(count, seed=count)
        got = session.run(None, {"images": images})
        expected = outputs_by_name(merged, torch.from_numpy(images))
        for (name, ours), theirs in zip(expected.items(), got, strict=True):
            assert theirs.shape == tuple(ours.shape)
            assert np.linalg.norm(theirs - ours.numpy()) < 1e-4 * float(ours.norm()), name


# Feature maps and head outputs by name, of timm models that have no file in families/.


def stages(word: str, places: Iterable[int]) -> dict[str, int | None]:
    return {**{f"{word}{place}_map": place for place in places}, "map": None}


MAPS: list[tuple[Callable[[], Checkpoint], dict[str, int | None]]] = [
    (partial(small, "convnext_atto", num_classes=0), {"patches": None, "stage1": 1, "stage3": 3}),
    (partial(small, "convnext_atto", num_classes=0), stages("stage", (1, 3))),
    (partial(small, "small_mixer", num_classes=0), {"patches": None, "block0": 0}),
    *((partial(checkpoint_of, each), dict(zip(NAMES, (0, 1, None, None), strict=True))) for each in (PVT, MAMBA)),
    *((RESNET, stages(word, range(1, 5))) for word in ("layer", "stage")),
    *((REGNET, stages(word, range(1, 5))) for word in ("s", "stage")),
    (partial(timm_models.checkpoint, "hiera", num_classes=0), {"patches": None, "block4_map": -1}),
]


@pytest.mark.parametrize(("build", "places"), MAPS)
def test_feature_maps_equal_timms(build: Callable[[], Checkpoint], places: dict[str, int | None]) -> None:
    """`places` has an index into timm's features, or None for the logits and the features that the head reads."""
    dense: Any = build().model
    assert_maps(dense, pixels(dense, 2), places)
    assert named_outputs_of(with_names(dense, ",".join(places))) == NamedOutputs(tuple(places))


def assert_maps(dense: Any, images: Tensor, places: dict[str, int | None]) -> None:
    """Compare named outputs with timm's features, as channels-first maps or as tokens by the output's name."""
    got = outputs_by_name(with_names(dense, ",".join(places)), images)
    with torch.inference_mode():
        last, maps = dense.forward_intermediates(images)
        logits = dense(images)
    for name, place in places.items():
        exact = logits if name == "logits" else last if place is None else maps[place]
        if exact.ndim == 4 and exact.shape[1:] != maps[-1].shape[1:] and place is None:
            exact = exact.permute(0, 3, 1, 2)
        if exact.ndim == 4 and not name.endswith("map"):
            exact = exact.flatten(2).mT
        if exact.ndim == 3 and name.endswith("map"):
            exact = exact.mT.unflatten(2, maps[-1].shape[2:])
        torch.testing.assert_close(got[name], exact, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("architecture", "names"), [(PVT, NAMES), (DENSENET, ("feature1_map", "logits")), (MAMBA, ("stage1_map", "map"))]
)
def test_reduced_model_keeps_its_feature_maps(
    architecture: Architecture, names: tuple[str, ...], tmp_path: Path
) -> None:
    dense = checkpoint_of(architecture)
    dense = replace(dense, model=with_outputs(dense.model, NamedOutputs(names)))
    np.save(tmp_path / "calibration.npy", images(48, seed=1))
    moments = calibrate(dense, images_for_model(dense.model, tmp_path / "calibration.npy"), batch_size=16)
    aligned = {"align_hidden": 4, "align_head": 4, "align_conv": 4}
    half = method_from_preset("best", mlp_sparsity=0.5, conv_sparsity=0.5, **aligned)
    reduced = replace(dense, model=reduce(dense.model, moments, half).model)
    save(reduced, tmp_path / "reduced")
    loaded = load_checkpoint(tmp_path / "reduced")
    assert named_outputs_of(loaded.model) == NamedOutputs(names)
    export_checkpoint(loaded, tmp_path / "reduced.onnx", precision="fp32")
    pixels = images(3, seed=2)
    given = onnxruntime.InferenceSession(tmp_path / "reduced.onnx").run(list(names), {"images": pixels})
    with torch.no_grad():
        expected, before = (each.model(torch.from_numpy(pixels)) for each in (loaded, dense))
    for got, wanted, was in zip(given, expected, before, strict=True):
        assert np.abs(got - wanted.numpy()).max() < 1e-4 * wanted.abs().max()
        assert 1e-4 < (wanted - was).norm() / was.norm() < 0.7


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("deit_tiny_distilled_patch16_224", {"class": [0], "patches": [*range(2, 18)]}),
        ("vit_small_patch16_dinov3", {"class": [0], "patches": [*range(5, 21)]}),
        ("cait_xxs24_224", {"class": [0], "patches": [*range(1, 17)]}),
        ("eva02_tiny_patch14_224", {"tokens": [*range(17)], "class": [0]}),
        ("vit_relpos_small_patch16_rpn_224", {"patches": [*range(16)]}),
    ],
)
def test_every_vit_kind_gives_its_tokens(name: str, kept: dict[str, list[int]]) -> None:
    model: Any = traced_timm(name, **SMALL)
    pixels = torch.from_numpy(images(2, seed=1))
    with torch.no_grad():
        tokens = model.forward_features(pixels)
    for each, got in outputs_by_name(with_names(model, ",".join(kept)), pixels).items():
        wanted = tokens[:, kept[each]]
        torch.testing.assert_close(got, wanted[:, 0] if each == "class" else wanted, msg=each)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("vit_tiny_patch16_224", "block0_map,class,block1_norm,patches"),
        ("swin_tiny_patch4_window7_224", "stage0_map,pooled"),
    ],
)
def test_walking_by_steps_reaches_every_output(name: str, names: str) -> None:
    """A model with named outputs has the same steps as one without."""
    swin = {"img_size": 32, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 2), "window_size": 4}
    dense = traced_timm(name, **(swin if "swin" in name else SMALL) | {"num_classes": 0})
    model, pixels = with_names(dense, names), torch.from_numpy(images(3, seed=1))
    with torch.no_grad():
        walk = StreamState.of(traced_model.first_stream(model, pixels), None)
        for step in steps_to_outputs(model):
            walk = walk.behind(step)
        for got, wanted in zip(outputs_of_walk(model, walk, pixels), model(pixels), strict=True):
            torch.testing.assert_close(got, wanted)
    assert [step.name for step in traced_model.steps(model)] == [step.name for step in traced_model.steps(dense)]


# Maps [B,C,H,W] of stages


def test_swin_maps_equal_timms() -> None:
    kwargs = {"img_size": (64, 96), "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
    dense = traced_timm("swin_tiny_patch4_window7_224", **kwargs, num_classes=0)
    images = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    assert_maps(dense, images, {"stage0_map": 0, "layer1_map": 1, "map": None})
    assert outputs_by_name(with_names(dense, "stage0_map"), images)["stage0_map"].shape == (2, 24, 16, 24), (
        "rows are not columns"
    )


def test_patches_form_a_map_only_for_images() -> None:
    dense = tiny.checkpoint(num_classes=0, img_size=(32, 48)).model
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        patches, found = with_names(dense, "patches,map")(images)
    assert found.shape == (2, 48, 4, 6)
    for row in range(4):
        for column in range(6):
            assert torch.equal(found[:, :, row, column], patches[:, 6 * row + column])


@pytest.mark.parametrize("form", ["maxvit_tf", "coatnet", "tiny_vit", "efficientformer_v2", "small_efficientnet"])
def test_hierarchical_stages_equal_timms_maps(form: str) -> None:
    """timm's features of an EfficientNet lie behind single blocks, but its stages have names, too."""
    if form == "small_efficientnet":
        dense, theirs, word = small_convnets.checkpoint(form).model, small_convnets.library(form), "block"
    else:
        dense, word = timm_models.checkpoint(form, num_classes=0).model, "stage"
        theirs = timm_models.library(form, num_classes=0)
    images, heard = timm_models.pixels(dense, 2), list[Tensor]()
    stages = list(theirs.get_submodule(f"{word}s").children())
    for stage in stages:
        stage.register_forward_hook(lambda _, __, out: heard.append(out))
    names = [f"{word}{index}_map" for index in range(len(stages))]
    with torch.inference_mode():
        theirs(images)
        got = with_names(dense, ",".join([*names, "map"]))(images)
    for name, ours, expected in zip(names, got, heard, strict=False):
        channels_first = expected if ours.shape == expected.shape else expected.movedim(-1, 1)
        torch.testing.assert_close(ours, channels_first, rtol=1e-4, atol=1e-4, msg=name)
    assert len(got) == len(stages) + 1
