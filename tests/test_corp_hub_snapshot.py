"""Snapshots of timm's repositories, names that would need a network, and models saved from snapshots."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import corp_deploy
from corp_deploy.families.family import image_spec
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from tests import small_convnets, tiny
from tests.command import invoked, refuses
from tests.refusals import rejects

NAME = tiny.ARCHITECTURE.name
MODEL_ARGS = {key: value for key, value in tiny.ARCHITECTURE.kwargs.items() if key != "num_classes"}
PRETRAINED = {
    "input_size": [3, 32, 32], "fixed_input_size": True, "interpolation": "bilinear", "crop_pct": 0.95,
    "crop_mode": "squash", "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "num_classes": 7, "classifier": "head",
}  # fmt: skip
CONFIG = {"architecture": NAME, "num_classes": 7, "model_args": MODEL_ARGS, "pretrained_cfg": PRETRAINED}


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    save_file(tiny.checkpoint().model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def with_config(snapshot: Path, config: Mapping[str, Any]) -> Path:
    (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot


def load(model: object, **kwargs: Any) -> Any:
    return load_dense(str(model), weights=None, kwargs={}, **kwargs)


def test_snapshot_loads_with_arguments_weights_and_preprocessing(snapshot: Path) -> None:
    for named in (snapshot, f"local-dir:{snapshot}"):
        loaded = load(named)
        torch.testing.assert_close(dict(loaded.model.state_dict()), dict(tiny.checkpoint().model.state_dict()))
        assert loaded.architecture.name == NAME
        found = image_spec(loaded.model).as_json()
        assert found | {key: value for key, value in PRETRAINED.items() if key in found} == found
        assert loaded.lineage["source"]["preprocessing"] == "snapshot/config.json"


def test_snapshot_provides_class_names(snapshot: Path) -> None:
    names = [f"digit {index}" for index in range(7)]
    assert load(with_config(snapshot, CONFIG | {"label_names": names})).lineage["class_names"] == names
    assert "class_names" not in load(with_config(snapshot, CONFIG | {"label_names": names[:-1]})).lineage


def test_snapshot_equals_timms_loader(snapshot: Path) -> None:
    theirs = timm.create_model(f"local-dir:{snapshot}", pretrained=True).eval()
    ours = load(snapshot)
    torch.testing.assert_close(dict(ours.model.state_dict()), dict(theirs.state_dict()))
    config = timm.data.resolve_model_data_config(theirs)
    assert image_spec(ours.model).as_json() == json.loads(json.dumps(dict(sorted(config.items()))))


@pytest.mark.slow("graph")
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_snapshot_is_benchmarked_and_verified_like_any_directory(backend: str, snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    torch.save(tiny.checkpoint().model.state_dict(), snapshot / "pytorch_model.bin")
    save(load(snapshot), tmp_path / "ours")
    few = ("--batch", 1, "--time-limit", 0.5, "--min-rounds", 6, "--half-width", 0.9, "--block-ms", 1)
    invoked("bench", snapshot, tmp_path / "ours", "--backend", backend, *few, "-o", tmp_path / "b.json")
    sizes = [each["size_bytes"] for each in json.loads((tmp_path / "b.json").read_text())["subjects"]]
    assert sizes[0] == sizes[1], sizes
    invoked("verify", tmp_path / "ours", snapshot, "--random", 2, "--max-error", 1e-6, "-o", tmp_path / "p.json")


@pytest.mark.parametrize("words", [("verify", "ours", "foreign", "--random", 1), ("bench", "ours", "foreign")])
def test_directory_of_another_library_is_named(words: tuple[object, ...], tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "ours")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"model_type": "swin"}')
    placed = [tmp_path / str(word) if word in ("ours", "foreign") else word for word in words]
    refuses("a swin of Hugging Face transformers; give it as --model hf:", *placed, "-o", tmp_path / "out.json")


def test_older_flat_snapshots_are_read(snapshot: Path) -> None:
    pixels = torch.from_numpy(tiny.images(2))
    expected = load(snapshot).model(pixels)
    loaded = load(with_config(snapshot, {"architecture": NAME, "model_args": MODEL_ARGS, **PRETRAINED}))
    torch.testing.assert_close(loaded.model(pixels), expected)
    assert tuple(image_spec(loaded.model).as_json()["mean"]) == (0.1, 0.2, 0.3)


def test_snapshot_loads_at_another_size_with_other_weights(snapshot: Path, tmp_path: Path) -> None:
    loaded = load_dense(str(snapshot), weights=None, kwargs={"img_size": 48})
    assert image_spec(loaded.model).shape == (3, 48, 48)
    assert "pos_embed resampled" in loaded.notes[0]
    other = tiny.checkpoint(seed=5).model.state_dict()
    torch.save(other, tmp_path / "fine-tuned.pth")
    tuned = load_dense(str(snapshot), weights=tmp_path / "fine-tuned.pth", kwargs={})
    torch.testing.assert_close(dict(tuned.model.state_dict()), dict(other))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "swin", "architectures": ["SwinModel"]},
            "a swin of Hugging Face transformers; give it as --model hf:",
        ),
        ({"model_type": "dinov2"}, "a dinov2 of Hugging Face transformers; give it as --model hf:"),
        ({"hello": 1}, "got keys hello"),
        ({"architecture": "a\nb"}, "got keys architecture"),
        (CONFIG | {"model_args": [1]}, "model_args: got a list of 1, expected a JSON object"),
        (CONFIG | {"pretrained_cfg": PRETRAINED | {"input_size": 224}}, "input_size: got 224, expected a list"),
        (CONFIG | {"pretrained_cfg": PRETRAINED | {"input_size": [10**12, 8, 8], "mean": [0.5]}}, "input_size"),
        (CONFIG | {"pretrained_cfg": PRETRAINED | {"mean": "x"}}, "mean: got 'x', expected a list"),
        (CONFIG | {"pretrained_cfg": PRETRAINED | {"std": [0.0, 1.0, 1.0]}}, "std is"),
        (CONFIG | {"architecture": "vit_tinny_patch16_224"}, "vit_tiny_patch16_224"),
    ],
)
def test_invalid_configuration_is_refused(config: Mapping[str, Any], message: str, snapshot: Path) -> None:
    rejects(message, load, with_config(snapshot, config))


def test_directory_without_configuration_or_weights_is_refused(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    rejects(r"no weights beside config\.json", load, snapshot)
    (snapshot / "config.json").unlink()
    rejects("a snapshot of one of timm's repositories", load, snapshot)


def test_reduced_model_does_not_need_the_snapshot(snapshot: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", tiny.images(12))
    moments, reduced = tmp_path / "m.safetensors", tmp_path / "reduced"
    model = f"local-dir:{snapshot}"
    invoked("calibrate", "--model", model, "--images", tmp_path / "images.npy", "-o", moments)
    invoked("reduce", "--model", model, "--moments", moments, "--mlp", 0.5, "--align", "mlp=8", "-o", reduced)
    before = image_spec(load(model).model).as_json()
    shutil.rmtree(snapshot)
    again = load_checkpoint(reduced)
    assert again.architecture.name == NAME
    assert str(tmp_path) not in (reduced / "config.json").read_text()
    assert image_spec(again.model).as_json() == before
    assert corp_deploy.load(reduced)(torch.from_numpy(tiny.images(2))).shape == (2, 7)
    invoked("inspect", "--model", reduced)


def test_saved_model_keeps_its_preprocessing(tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["input"]["preprocessing"]["crop_pct"] = 0.25
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert image_spec(load_checkpoint(tmp_path).model).as_json()["crop_pct"] == 0.25


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", "hf download timm/vit_tiny_patch16_224.augreg_in21k"),
        ("hf_hub:timm/vit_tiny_patch16_224", "nothing is ever downloaded"),
        ("timm/vit_tiny_patch16_224.augreg_in21k", "--local-dir vit_tiny_patch16_224.augreg_in21k"),
        ("google/vit-base-patch16-224", "hf download google/vit-base-patch16-224 --local-dir vit-base-patch16-224"),
        ("local-dir:nowhere", "there is no such directory"),
        ("./nowhere/at/all", "there is no such directory"),
        ("mypkg.models:Net", "timm's names have no '/' or ':'"),
        ("ViT-B/32", "vit_base_patch32_clip_224"),
        ("deit_smal_patch16_224", "deit_small_patch16_224"),
        ("vit_b_16", "vit_base_patch16_224"),
        ("dinov2_vits14", "vit_small_patch14_dinov2"),
        ("vit_tiny_patch16_224.nonsense", "timm's tags of vit_tiny_patch16_224: augreg_in21k"),
    ],
)
def test_unknown_names_are_refused_at_once(name: str, message: str) -> None:
    rejects(re.escape(message), load, name)


def test_recorded_names_never_cause_network_access(tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["timm"]["name"] = "hf-hub:timm/vit_tiny_patch16_224"
    (tmp_path / "config.json").write_text(json.dumps(config))
    rejects("nothing is ever downloaded", load_checkpoint, tmp_path)


@pytest.mark.parametrize("key", ["pretrained", "pretrained_cfg", "checkpoint_path", "cache_dir"])
def test_weights_are_read_only_from_the_snapshot(key: str) -> None:
    rejects(f"{key} is not taken", load_dense, NAME, weights=None, kwargs={key: True})


def test_saved_model_states_the_size_and_classes_of_its_tag(tmp_path: Path) -> None:
    small: dict[str, Any] = {"embed_dim": 48, "depth": 1, "num_heads": 3}
    torch.save(timm.create_model("vit_tiny_patch16_224.augreg_in21k", **small).state_dict(), tmp_path / "w.pth")
    loaded = load_dense("vit_tiny_patch16_224.augreg_in21k", weights=tmp_path / "w.pth", kwargs=small)
    save(loaded, tmp_path / "dense")
    record = json.loads((tmp_path / "dense" / "config.json").read_text())["timm"]
    assert record["name"] == NAME
    assert record["kwargs"] == small | {"num_classes": 21843, "img_size": [224, 224]}
    again = load_checkpoint(tmp_path / "dense")
    torch.testing.assert_close(dict(again.model.state_dict()), dict(loaded.model.state_dict()))
    assert image_spec(again.model) == image_spec(loaded.model)


RECIPE = """
[model]
model = "{model}"
{more}
[calibration]
images = "images.npy"
[held_out]
images = "images.npy"
[reduce]
mlp = 0.5
"""


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("hf-hub:timm/vit_tiny_patch16_224", 'weights = "w.pth"', "nothing is ever downloaded"),
        ("dense", "kwargs = {{ img_size = 48 }}", "drop model.kwargs"),
        ("dense", "ema = true\nmean = [0.5]", "drop model.ema, model.mean"),
        ("dense", 'weights = "images.npy"', "drop model.weights"),
    ],
)
def test_release_refuses_a_bad_snapshot_before_it_runs(model: str, more: str, message: str, tmp_path: Path) -> None:
    tiny.written(tmp_path, 8)
    (tmp_path / "w.pth").touch()
    (tmp_path / "r.toml").write_text(RECIPE.format(model=model, more=more.format()))
    refuses(message, "release", tmp_path / "r.toml", "-o", tmp_path / "out", "--dry-run")


def test_release_of_a_snapshot_is_planned(snapshot: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", tiny.images(8))
    named = ("--images", tmp_path / "images.npy", "--held-out", tmp_path / "images.npy")
    invoked("release", tmp_path / "r.toml", "--init", f"local-dir:{snapshot}", *named)
    assert f'model = "./snapshot"    # {NAME}' in (tmp_path / "r.toml").read_text()
    invoked("release", tmp_path / "r.toml", "-o", tmp_path / "out", "--dry-run")
    refuses("deit_small_patch16_224", "release", tmp_path / "other.toml", "--init", "deit_smal_patch16_224")


def test_size_free_network_uses_the_size_of_its_snapshot(tmp_path: Path) -> None:
    """timm's own size for this name is 224."""
    args = {key: value for key, value in small_convnets.SMALL["resnet18"].items() if key != "img_size"}
    pretrained = {**PRETRAINED, "input_size": [3, 48, 48], "fixed_input_size": False, "classifier": "fc"}
    config = {"architecture": "resnet18", "num_classes": 7, "model_args": args, "pretrained_cfg": pretrained}
    save_file(small_convnets.library("resnet18").state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_dense(str(tmp_path), weights=None, kwargs={}).model
    assert image_spec(model).shape == (3, 48, 48)
    assert small_convnets.error(model, small_convnets.library("resnet18"), small_convnets.pixels(2)) < 1e-5
