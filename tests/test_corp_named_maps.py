"""Stages' maps [B,C,H,W] as named outputs: their values, and a ConvNeXt's through closed loop, graphs, proof and
repository.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from corp_deploy import load
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import output_ports, with_outputs
from corp_deploy.store.checkpoint import dense_from_architecture, save
from corp_deploy.traced.models.outputs import outputs_from_text
from ground.errors import BadInput
from tests import small_convnets, timm_models, tiny
from tests.command import invoked
from tests.small_models import pixels, small

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
