"""Preprocessing from the command line to the reduced model: inspection, records, files, refusals and grey images."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import corp_deploy
from calib.store import load_moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec
from corp_deploy.invocation.running import FedOptions
from corp_deploy.proof.chain import prove_chain
from corp_deploy.proof.limits import ParityLimits
from corp_deploy.proof.model_inputs import draw_random_inputs, open_timed_inputs
from corp_deploy.proof.port_images import images_of_port
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.recipe_toml import text_of_recipe
from corp_deploy.release.stage import settings_of
from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.store import checkpoint as directories
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.module_model import checkpoint_from_module
from corp_deploy.store.onnx_file import metadata_of_checkpoint
from ground.feeds import single_array
from ground.ports import Port
from tests import tiny
from tests.command import invoked, refuses, run
from tests.refusals import rejects

KEYS = tiny.ARCHITECTURE.kwargs
NAME, KWARGS = tiny.ARCHITECTURE.name, json.dumps(dict(KEYS))
RESIZED = ("--crop-pct", "1", "--interpolation", "bilinear", "--crop-mode", "squash")
SET = ("--mean", "0.485,0.456,0.406", "--std", "0.25", *RESIZED)
FOUND = {
    "mean": [0.485, 0.456, 0.406], "std": [0.25, 0.25, 0.25], "crop_pct": 1.0, "interpolation": "bilinear",
    "crop_mode": "squash", "input_size": [3, 32, 32],
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make weights in a trainer's file, a folder of pictures, and moments with the preprocessing SET."""
    root = tmp_path_factory.mktemp("home")
    state = tiny.checkpoint().model.state_dict()
    average = {name: tensor * 1.01 for name, tensor in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": average}, root / "last.pth.tar")
    save_file(state, root / "weights.safetensors")
    (root / "photos").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "photos" / f"{number}.png")
    invoked("calibrate", *model_words(root), *SET, "--images", root / "photos", "-o", root / "m.safetensors")
    return root


def model_words(home: Path) -> tuple[object, ...]:
    return "--model", NAME, "--weights", home / "last.pth.tar", "--model-kwargs", KWARGS


def inspected(*words: object) -> Any:
    return json.loads(invoked("inspect", *words, "--json").stdout)


def test_inspect_shows_timms_and_chosen_preprocessing(home: Path) -> None:
    default = inspected(*model_words(home))
    assert default["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    assert default["preprocessing_source"] == "timm's tag augreg_in21k_ft_in1k"
    (note,) = default["weights"].pop("notes")
    assert "took state_dict_ema, the moving average" in note
    assert default["weights"] == {"weights": "last.pth.tar", "taken": "state_dict_ema"}
    found = inspected(*model_words(home), *SET)
    assert found["preprocessing"] == FOUND
    assert found["preprocessing_source"].startswith(
        "mean, std, crop_pct, interpolation, crop_mode as given, the rest from timm's"
    )
    shown = run("inspect", *model_words(home), *SET)
    assert "3x32x32, bilinear, crop 1 (squash), mean 0.485 0.456 0.406, std 0.25 0.25 0.25" in shown.stdout
    assert "took state_dict_ema, the moving average" in shown.stderr


def test_each_tag_has_its_own_preprocessing(home: Path) -> None:
    record = inspected("--model", "vit_base_patch16_224.dino", *model_words(home)[2:])
    assert record["preprocessing"]["mean"] == [0.485, 0.456, 0.406]
    assert record["preprocessing_source"] == "timm's tag dino"


def test_calibrate_shows_and_records_the_preprocessing(home: Path, tmp_path: Path) -> None:
    words = ("calibrate", *model_words(home), *SET, "--images", home / "photos", "-o", tmp_path / "m.safetensors")
    assert json.loads(invoked(*words, "--no-attention", "--json").stdout)["preprocessing"] == FOUND
    assert json.loads(load_moments(tmp_path / "m.safetensors").lineage["preprocessing"]) == FOUND
    shown = run(*words, "--no-attention").stdout
    assert "preprocessing: 3x32x32, bilinear, crop 1 (squash), mean 0.485" in shown


def test_images_are_preprocessed_as_chosen(home: Path) -> None:
    given = Preprocessing(mean=(0.1,), std=(0.5,), crop_pct=1.0, interpolation="nearest")
    model = load_dense(NAME, weights=home / "weights.safetensors", kwargs=KEYS, preprocessing=given).model
    (batch,) = images_for_model(model, home / "photos", samples=1, seed=0).batches(1)
    raw = batch[0] * 0.5 + 0.1
    assert float(raw.min()) >= 0.0
    assert float(raw.max()) <= 1.0
    assert len(set((raw * 255).round().flatten().tolist())) > 100
    torch.testing.assert_close(raw * 255, (raw * 255).round(), atol=1e-3, rtol=0, msg="nearest mixes no pixels")


def test_moments_of_another_preprocessing_are_refused(home: Path, tmp_path: Path) -> None:
    words = (
        "reduce",
        *model_words(home),
        "--moments",
        home / "m.safetensors",
        "--mlp",
        0.5,
        "-o",
        tmp_path / "reduced",
    )
    result = invoked(*words, code=2)
    assert '"mean": [0.485, 0.456, 0.406]' in result.stderr
    assert '"mean": [0.5, 0.5, 0.5]' in result.stderr
    assert not (tmp_path / "reduced").exists()
    other = tmp_path / "other.safetensors"
    photos = ("--images", home / "photos", "--samples", 4)
    invoked("calibrate", *model_words(home), *photos, "-o", other)
    merged = invoked("calibrate", "--merge", home / "m.safetensors", other, "-o", tmp_path / "both.safetensors", code=2)
    assert '"std": [0.25, 0.25, 0.25]' in merged.stderr
    assert '"std": [0.5, 0.5, 0.5]' in merged.stderr


def test_reduced_model_stores_the_preprocessing(home: Path, tmp_path: Path) -> None:
    reduced = tmp_path / "reduced"
    words = ("reduce", *model_words(home), *SET, "--moments", home / "m.safetensors", "--mlp", 0.5, "--align", "mlp=8")
    invoked(*words, "-o", reduced)
    assert json.loads((reduced / "config.json").read_text())["input"]["preprocessing"] == FOUND
    assert traced_model.input_spec(load_checkpoint(reduced).model).as_json() == FOUND
    again = inspected("--model", reduced)
    assert again["weights"]["taken"] == "state_dict_ema"
    assert again["preprocessing_source"].startswith("mean, std")
    refuses("drop --mean, --crop-pct", "inspect", "--model", reduced, "--mean", "0.5", "--crop-pct", "1")


def test_raw_weights_are_loaded_on_request(home: Path) -> None:
    assert inspected(*model_words(home), "--no-ema")["weights"]["taken"] == "state_dict"
    plain = ("--model", NAME, "--weights", home / "weights.safetensors", "--model-kwargs", KWARGS, "--ema")
    refuses("nothing in it is called a moving average", "inspect", *plain)


def test_weights_under_a_key_are_loaded_on_request(home: Path, tmp_path: Path) -> None:
    source = inspected(*model_words(home), "--weights-key", "state_dict")["weights"]
    assert source["taken"] == "state_dict"
    again = corp_deploy.Source(NAME, weights=home / "last.pth.tar", kwargs=json.loads(KWARGS), weights_key="state_dict")
    assert again.opened().lineage["source"]["taken"] == "state_dict"
    refuses("--weights-key 'other': no tensors under it; it holds state_dict", "inspect", *model_words(home),
            "--weights-key", "other")  # fmt: skip
    directories.save(tiny.checkpoint(), tmp_path)
    refuses("drop --weights-key", "inspect", "--model", tmp_path, "--weights-key", "other")


IMPOSSIBLE = {
    "--mean": ("nan", "0.5,x"), "--std": ("0", "0.5,-1,0.5"), "--crop-pct": ("0", "1.5"),
    "--interpolation": ("random",), "--crop-mode": ("top",),
}  # fmt: skip


@pytest.mark.parametrize("option", IMPOSSIBLE)
def test_impossible_values_are_usage_errors(option: str, home: Path) -> None:
    for value in IMPOSSIBLE[option]:
        refuses(f"Invalid value for '{option}'", "inspect", *model_words(home), option, value)


def test_mean_and_std_need_one_number_per_channel(home: Path) -> None:
    refuses("mean has 2 numbers, expected 1 or 3", "inspect", *model_words(home), "--mean", "0.1,0.2")
    rejects("mean has 3 numbers, expected 1: one for each channel", Preprocessing(mean=(0.1, 0.2, 0.3)).for_channels, 1)
    rejects("crop_mode is 'middle'", Preprocessing, crop_mode="middle")


RECIPE = """
[model]
model = "vit_tiny_patch16_224"
weights = "last.pth.tar"
ema = false
weights_key = "state_dict"
mean = [0.485, 0.456, 0.406]
std = [0.25]
crop_pct = 1.0
interpolation = "bilinear"
crop_mode = "border"
[calibration]
images = "photos"
[held_out]
images = "photos"
[reduce]
mlp = 0.5
"""


def test_recipe_has_the_same_preprocessing_keys(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    recipe = load_recipe(path)
    assert (recipe.model.ema, recipe.model.weights_key) == (False, "state_dict")
    assert settings_of("model", recipe.model)["model.weights_key"] == "state_dict"
    assert recipe.model.preprocessing == Preprocessing(
        mean=(0.485, 0.456, 0.406), std=(0.25,), crop_pct=1.0, interpolation="bilinear", crop_mode="border"
    )
    kept = tomllib.loads(text_of_recipe(recipe, tmp_path))["model"]
    assert (kept["ema"], kept["weights_key"]) == (False, "state_dict")
    assert kept["std"] == [0.25]


def test_release_reports_loaded_and_skipped_weights(home: Path, tmp_path: Path) -> None:
    state = tiny.checkpoint().model.state_dict()
    lightning = {"loss.weight": torch.ones(1)} | {f"model.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": lightning}, tmp_path / "last.pth.tar")
    kwargs = f"kwargs = {{ {', '.join(f'{k} = {v}' for k, v in KEYS.items())} }}"
    text = RECIPE.replace('ema = false\nweights_key = "state_dict"', kwargs)
    (tmp_path / "r.toml").write_text(text.replace('"photos"', f'"{home / "photos"}"'))
    words = ("release", tmp_path / "r.toml", "-o", tmp_path / "out", "--only", "recipe", "--only", "dense",
             "--trust-paths")  # fmt: skip
    first = invoked(*words)
    assert "took state_dict_ema.model, the moving average" in " ".join(first.stderr.split())
    assert "left out tensors beside the model: loss.weight" in " ".join(first.stderr.split())
    assert "moving average" not in run(*words).stderr, "nothing is loaded again"
    recorded = json.loads((tmp_path / "out" / "dense" / "config.json").read_text())["lineage"]["source"]["notes"]
    assert [note.split()[1] for note in recorded] == ["took", "renamed", "left"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mean = 0.5", "model.mean is 0.5, expected a list"),
        ('crop_mode = "x"', "model.crop_mode is 'x'"),
        ("ema = 1", "model.ema is 1"),
    ],
)
def test_recipe_refuses_what_the_commands_refuse(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    key = line.partition(" =")[0]
    kept = [each for each in RECIPE.splitlines() if not each.startswith(f"{key} =")]
    path.write_text("\n".join(kept).replace("[model]", f"[model]\n{line}"))
    rejects(message.replace("[", r"\["), load_recipe, path)


NORMALISATION = {"mean", "std"}


def load_of_channels(folder: Path, channels: int, prepared: Preprocessing | None = None) -> Checkpoint:
    """Load a model whose timm preset has three channels with weights of another number; write arrays to feed it."""
    arguments = {**KEYS, "in_chans": channels, "depth": 1}
    save_file(tiny.checkpoint(**arguments).model.state_dict(), folder / "w.safetensors")
    np.savez(folder / "images.npz", images=np.resize(tiny.images(8), (8, channels, 32, 32)))
    np.savez(folder / "pixels.npz", images=np.full((8, channels, 32, 32), 51, np.uint8))
    return load_dense(NAME, weights=folder / "w.safetensors", kwargs=arguments, preprocessing=prepared)


def words_of(folder: Path, channels: int) -> tuple[object, ...]:
    kwargs = json.dumps({**KEYS, "in_chans": channels, "depth": 1})
    return "--model", NAME, "--weights", folder / "w.safetensors", "--model-kwargs", kwargs


def refusal_of(channels: int) -> str:
    """Return the message of every attempt to normalise pixels without a mean for these channels."""
    of = f"{channels} channel{'s'[: channels > 1]}"
    return (
        f"pixels can't be normalised for a model of {of}: its mean, 0.5 0.5 0.5, is of 3 channels and its std, "
        f"0.5 0.5 0.5, is of 3 channels; give --mean and --std for {of}"
    )


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_preset_for_other_channels_is_neither_applied_nor_written(channels: int, tmp_path: Path) -> None:
    taken = load_of_channels(tmp_path, channels)
    assert not NORMALISATION & image_spec(taken.model).as_json().keys()
    assert image_spec(taken.model).as_line() == f"{channels}x32x32, bicubic, crop 0.9 (center), no mean, no std"
    note = json.loads(metadata_of_checkpoint(taken)["corp_deploy.preprocessing"])
    assert note == image_spec(taken.model).as_json()
    directories.save(taken, tmp_path / "dense")
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["input"]["preprocessing"] == note
    again = load_checkpoint(tmp_path / "dense").model
    assert images_for_model(again, tmp_path / "images.npz").count == 8
    refusal = re.escape(f"{tmp_path}/pixels.npz: {refusal_of(channels)}")
    message = f"^{refusal}.*images \\[N,{channels},32,32\\] float32, prep"
    rejects(message, images_for_model, again, tmp_path / "pixels.npz")
    given = load_of_channels(tmp_path, channels, Preprocessing(mean=(0.2,), std=(0.5,)))
    (batch,) = images_for_model(given.model, tmp_path / "pixels.npz").batches(8)
    assert batch.abs().max() < 1e-6
    half = load_of_channels(tmp_path, channels, Preprocessing(mean=(0.2,)))
    assert "mean" in image_spec(half.model).as_json()
    rejects(r"its std, 0.5 0.5 0.5, is of 3 channels", images_for_model, half.model, tmp_path / "pixels.npz")


def test_single_number_of_a_preset_applies_to_its_own_channels(tmp_path: Path) -> None:
    """A snapshot's one mean is for all of its own channels, but not for channels that kwargs add."""
    for channels, size, kwargs, expected in ((3, 3, {}, [0.5] * 3), (1, 1, {}, [0.5]), (3, 1, {"in_chans": 3}, None)):
        config = {"mean": [0.5], "std": [0.5], "input_size": [size, 32, 32], "fixed_input_size": True}
        own = {name: value for name, value in KEYS.items() if name not in ("num_classes", "img_size")}
        snapshot = {"architecture": NAME, "num_classes": 7, "pretrained_cfg": config, "model_args": own}
        (tmp_path / "config.json").write_text(json.dumps(snapshot))
        save_file(tiny.checkpoint(in_chans=channels).model.state_dict(), tmp_path / "model.safetensors")
        taken = load_dense(str(tmp_path), weights=None, kwargs=kwargs)
        assert image_spec(taken.model).as_json().get("mean") == expected
        directories.save(taken, tmp_path / "dense")
        assert image_spec(load_checkpoint(tmp_path / "dense").model).as_json().get("mean") == expected
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "photos" / "a.png")
    message = "photos: pixels can't be normalised .* its mean, 0.5, is of 1 channel"
    rejects(message, images_for_model, taken.model, tmp_path / "photos")


def test_module_with_other_channels_is_used_unchanged() -> None:
    model = tiny.timm_model("test_vit", in_chans=1)
    assert not NORMALISATION & image_spec(checkpoint_from_module(model).model).as_json().keys()


def test_three_channel_mean_is_not_applied_to_grey_images(tmp_path: Path) -> None:
    """Directories and graphs of grey models may record a mean of three channels."""
    directories.save(load_of_channels(tmp_path, 1), tmp_path / "dense")
    path = tmp_path / "dense" / "config.json"
    config = json.loads(path.read_text())
    earlier = config["input"]["preprocessing"] | {"mean": [0.1, 0.2, 0.3], "std": [0.5] * 3}
    path.write_text(json.dumps(config | {"input": {"shape": [1, 32, 32], "preprocessing": earlier}}))
    model = load_checkpoint(tmp_path / "dense").model
    assert not NORMALISATION & image_spec(model).as_json().keys()
    port, note = Port(name="images", shape=(1, 32, 32)), json.dumps(earlier)
    drawn: dict[str, Any] = {"where": "m.onnx", "samples": None, "seed": 0}
    assert images_of_port(port, note, tmp_path / "images.npz", **drawn).count == 8
    message = "pixels.npz: .* its mean, 0.1 0.2 0.3, is of 3 channels"
    rejects(message, images_of_port, port, note, tmp_path / "pixels.npz", **drawn)
    pixels = images_of_port(replace(port, dtype="uint8"), note, tmp_path / "pixels.npz", **drawn)
    assert np.unique(single_array(pixels.feeds)).tolist() == [51]


def test_pixels_without_normalisation_are_refused_before_writing(tmp_path: Path) -> None:
    load_of_channels(tmp_path, 1)
    before = sorted(path.name for path in tmp_path.iterdir())
    model, out, pixels = words_of(tmp_path, 1), tmp_path / "out.onnx", ("--images", tmp_path / "pixels.npz")
    for words, message in (
        (("calibrate", *model, *pixels, "--max-bad", 8, "-o", tmp_path / "m.safetensors"), "pixels.npz: "),
        (("export", *model, *pixels, "--precision", "fp32,int8", "-o", out), "pixels.npz: "),
        (("export", *model, "--precision", "fp32,fp16", "--input", "uint8", "-o", out), "input uint8: "),
    ):
        result = invoked(*words, code=2)
        assert result.stderr.count(message + refusal_of(1)) == 1
        assert "exporting" not in result.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert result.stderr.endswith("where the model is named with its weights, or leave --input out\n")


def test_release_with_impossible_pixel_graphs_ends_at_its_first_stage(tmp_path: Path) -> None:
    load_of_channels(tmp_path, 1)
    table = ", ".join(f"{name} = {value}" for name, value in {**KEYS, "in_chans": 1, "depth": 1}.items())
    (tmp_path / "r.toml").write_text(
        f'[model]\nmodel = "{NAME}"\nweights = "w.safetensors"\nkwargs = {{ {table} }}\n'
        '[calibration]\nimages = "images.npz"\n[held_out]\nimages = "images.npz"\n[reduce]\nmlp = 0.5\n'
        '[export]\ninput = "uint8"\n'
    )
    refuses(refusal_of(1), "release", tmp_path / "r.toml", "-o", tmp_path / "out")
    assert not (tmp_path / "out" / "dense").exists()


def test_grey_arrays_are_used_for_bench_and_verify(tmp_path: Path) -> None:
    """Only pixels need a mean; arrays of float32 are preprocessed."""
    grey = load_of_channels(tmp_path, 1)
    directories.save(grey, tmp_path / "dense")
    timed, ports = FedOptions(images=tmp_path / "images.npz"), image_spec(grey.model).ports
    assert single_array(open_timed_inputs(timed, ports, [tmp_path / "dense"], 2).feeds).shape == (2, 1, 32, 32)
    fed = FedOptions(images=tmp_path / "pixels.npz")
    rejects("pixels.npz: pixels can't be normalised", open_timed_inputs, fed, ports, [tmp_path / "dense"], 2)
    rejects("random pixels: pixels can't be normalised", draw_random_inputs, grey, 2, 0, pixels=True)
    assert draw_random_inputs(grey, 2, 0).count == 2


def test_moments_of_another_model_are_refused_before_the_proof(home: Path) -> None:
    dense = tiny.checkpoint(seed=1)
    inputs = draw_random_inputs(dense, 2, 0)

    def never(*_: object) -> None:
        raise AssertionError("it was run")

    given: dict[str, Any] = {"moments": load_moments(home / "m.safetensors"), "answered": never}
    rejects("taken on another model", prove_chain, dense, [], inputs, limits=ParityLimits(), **given)


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"mean": 0.5}, "mean: got 0.5, expected a list or null"),
        ({"std": ["a"]}, "std[0]: got 'a', expected a number"),
        ({"classifier": 5}, "classifier: got 5, expected a text or a list"),
        ({"input_size": [3, "a", 4]}, "input_size[1]: got 'a', expected a whole number"),
        ({"input_size": None}, "the key 'input_size' is missing"),
    ],
)
def test_configuration_overlay_is_typed(overlay: Mapping[str, object], message: str, home: Path) -> None:
    kwargs = json.dumps({**KEYS, "pretrained_cfg_overlay": overlay})
    words = ("inspect", "--model", NAME, "--weights", home / "weights.safetensors", "--model-kwargs", kwargs)
    for each in (f"its pretrained_cfg: {message}", "check --model-kwargs"):
        refuses(each, *words)
