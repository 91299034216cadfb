"""Preprocessing from the command line to the reduced model: shown, recorded, kept, and never mixed."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors.torch import save_file

from calib.store import load
from corp_deploy.cli import main
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.preprocessing import Preprocessing
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.recipe_toml import text_of_recipe
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.inputs import images_for_model
from ground.errors import BadInput
from tests import tiny

KEYS = tiny.ARCHITECTURE.kwargs
NAME, KWARGS = tiny.ARCHITECTURE.name, json.dumps(dict(KEYS))
RESIZED = ("--crop-pct", "1", "--interpolation", "bilinear", "--crop-mode", "squash")
SET = ("--mean", "0.485,0.456,0.406", "--std", "0.25", *RESIZED)
FOUND = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.25, 0.25, 0.25],
    "crop_pct": 1.0,
    "interpolation": "bilinear",
    "crop_mode": "squash",
    "input_size": [3, 32, 32],
}


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in a trainer's file, a folder of pictures, and moments with the preprocessing set."""
    root = tmp_path_factory.mktemp("home")
    state = tiny.checkpoint().model.state_dict()
    average = {name: tensor * 1.01 for name, tensor in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": average}, root / "last.pth.tar")
    save_file(state, root / "weights.safetensors")
    (root / "photos").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "photos" / f"{number}.png")
    done = run("calibrate", *named(root), *SET, "--images", root / "photos", "-o", root / "m.safetensors")
    assert done.exit_code == 0, done.output
    return root


def named(home: Path) -> tuple[object, ...]:
    return "--model", NAME, "--weights", home / "last.pth.tar", "--model-kwargs", KWARGS


def as_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_inspect_shows_what_timm_takes_for_a_name_and_what_was_set(home: Path) -> None:
    default = as_json(run("inspect", *named(home), "--json"))
    assert default["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    assert default["preprocessing_source"] == "timm's tag augreg_in21k_ft_in1k"
    (note,) = default["weights"].pop("notes")
    assert "took state_dict_ema, the moving average" in note
    assert default["weights"] == {"weights": "last.pth.tar", "taken": "state_dict_ema"}
    given = as_json(run("inspect", *named(home), *SET, "--json"))
    assert given["preprocessing"] == FOUND
    assert given["preprocessing_source"].startswith(
        "mean, std, crop_pct, interpolation, crop_mode as given, the rest from timm's"
    )
    shown = run("inspect", *named(home), *SET)
    assert "3x32x32, bilinear, crop 1 (squash), mean 0.485 0.456 0.406, std 0.25 0.25 0.25" in shown.stdout
    assert "took state_dict_ema, the moving average" in shown.stderr


def test_another_tag_of_a_name_has_its_own(home: Path) -> None:
    words = (
        "--model",
        "vit_base_patch16_224.dino",
        "--weights",
        home / "weights.safetensors",
        "--model-kwargs",
        KWARGS,
    )
    record = as_json(run("inspect", *words, "--json"))
    assert record["preprocessing"]["mean"] == [0.485, 0.456, 0.406]
    assert record["preprocessing_source"] == "timm's tag dino"


def test_calibrate_shows_and_records_it(home: Path, tmp_path: Path) -> None:
    words = ("calibrate", *named(home), *SET, "--images", home / "photos", "-o", tmp_path / "m.safetensors")
    record = as_json(run(*words, "--no-attention", "--json"))
    assert record["preprocessing"] == FOUND
    assert json.loads(load(tmp_path / "m.safetensors").lineage["preprocessing"]) == FOUND
    shown = run(*words, "--no-attention").stdout
    assert "preprocessing: 3x32x32, bilinear, crop 1 (squash), mean 0.485" in shown


def test_pictures_are_prepared_as_set(home: Path) -> None:
    given = Preprocessing(mean=(0.1,), std=(0.5,), crop_pct=1.0, interpolation="nearest")
    model = load_dense(
        NAME, weights=home / "weights.safetensors", kwargs=tiny.ARCHITECTURE.kwargs, preprocessing=given
    ).model
    (batch,) = images_for_model(model, home / "photos", samples=1, seed=0).batches(1)
    raw = batch[0] * 0.5 + 0.1
    assert float(raw.min()) >= 0.0
    assert float(raw.max()) <= 1.0
    assert len(set((raw * 255).round().flatten().tolist())) > 100
    torch.testing.assert_close(raw * 255, (raw * 255).round(), atol=1e-3, rtol=0)  # nearest mixes no pixels


def test_moments_of_another_preprocessing_are_refused_with_both_shown(home: Path, tmp_path: Path) -> None:
    words = ("reduce", *named(home), "--moments", home / "m.safetensors", "--mlp", 0.5, "-o", tmp_path / "reduced")
    result = run(*words)
    assert result.exit_code == 2
    assert '"mean": [0.485, 0.456, 0.406]' in result.stderr
    assert '"mean": [0.5, 0.5, 0.5]' in result.stderr
    assert not (tmp_path / "reduced").exists()
    other = tmp_path / "other.safetensors"
    photos = ("--images", home / "photos", "--samples", 4)
    assert run("calibrate", *named(home), *photos, "-o", other).exit_code == 0
    merged = run("merge-moments", home / "m.safetensors", other, "-o", tmp_path / "both.safetensors")
    assert merged.exit_code == 2
    assert '"std": [0.25, 0.25, 0.25]' in merged.stderr
    assert '"std": [0.5, 0.5, 0.5]' in merged.stderr


def test_a_reduced_model_carries_it(home: Path, tmp_path: Path) -> None:
    reduced = tmp_path / "reduced"
    words = ("reduce", *named(home), *SET, "--moments", home / "m.safetensors", "--mlp", 0.5, "--align", "mlp=8")
    done = run(*words, "-o", reduced)
    assert done.exit_code == 0, done.output
    assert json.loads((reduced / "config.json").read_text())["input"]["preprocessing"] == FOUND
    assert vit.input_spec(load_checkpoint(reduced).model).as_json() == FOUND
    again = as_json(run("inspect", "--model", reduced, "--json"))
    assert again["weights"]["taken"] == "state_dict_ema"
    assert again["preprocessing_source"].startswith("mean, std")
    refused = run("inspect", "--model", reduced, "--mean", "0.5", "--crop-pct", "1")
    assert refused.exit_code == 2
    assert "drop --mean, --crop-pct" in refused.stderr


def test_raw_weights_on_request(home: Path) -> None:
    record = as_json(run("inspect", *named(home), "--no-ema", "--json"))
    assert record["weights"]["taken"] == "state_dict"
    plain = run(
        "inspect", *named(home)[:2], "--weights", home / "weights.safetensors", "--model-kwargs", KWARGS, "--ema"
    )
    assert plain.exit_code == 2
    assert "there is no state_dict_ema" in plain.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--mean", "nan"),
        ("--mean", "0.5,x"),
        ("--std", "0"),
        ("--std", "0.5,-1,0.5"),
        ("--crop-pct", "0"),
        ("--crop-pct", "1.5"),
        ("--interpolation", "random"),
        ("--crop-mode", "top"),
    ],
)
def test_impossible_values_are_usage_errors(words: tuple[str, ...], home: Path) -> None:
    result = run("inspect", *named(home), *words)
    assert result.exit_code == 2
    assert f"Invalid value for '{words[0]}'" in result.stderr


def test_as_many_numbers_as_channels(home: Path) -> None:
    result = run("inspect", *named(home), "--mean", "0.1,0.2")
    assert result.exit_code == 2
    assert "mean has 2 numbers, expected 1 or 3" in result.stderr
    with pytest.raises(BadInput, match="crop_mode is 'middle'"):
        Preprocessing(crop_mode="middle")


RECIPE = """
[model]
model = "vit_tiny_patch16_224"
weights = "last.pth.tar"
ema = false
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


def test_a_recipe_has_the_same_keys_and_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    recipe = load_recipe(path)
    assert recipe.model.ema is False
    assert recipe.model.preprocessing == Preprocessing(
        mean=(0.485, 0.456, 0.406), std=(0.25,), crop_pct=1.0, interpolation="bilinear", crop_mode="border"
    )
    kept = tomllib.loads(text_of_recipe(recipe, tmp_path))["model"]
    assert kept["ema"] is False
    assert kept["std"] == [0.25]


def test_a_release_says_which_weights_were_taken_and_what_was_left_out(home: Path, tmp_path: Path) -> None:
    state = tiny.checkpoint().model.state_dict()
    lightning = {"loss.weight": torch.ones(1)} | {f"model.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": lightning}, tmp_path / "last.pth.tar")
    text = RECIPE.replace("ema = false", f"kwargs = {{ {', '.join(f'{k} = {v}' for k, v in KEYS.items())} }}")
    (tmp_path / "r.toml").write_text(text.replace('"photos"', f'"{home / "photos"}"'))
    words = ("release", tmp_path / "r.toml", "-o", tmp_path / "out", "--only", "recipe", "--only", "dense",
             "--trust-paths")  # fmt: skip
    first = run(*words)
    assert first.exit_code == 0, first.output
    assert "took state_dict_ema, the moving average" in " ".join(first.stderr.split())
    assert "left out what stands beside the model: loss.weight" in " ".join(first.stderr.split())
    assert "moving average" not in run(*words).stderr  # nothing was loaded
    recorded = json.loads((tmp_path / "out" / "dense" / "config.json").read_text())["lineage"]["source"]["notes"]
    assert len(recorded) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mean = 0.5", "model.mean is 0.5, expected a list"),
        ("std = [0.0]", "model.std is"),
        ("crop_pct = 2", "model.crop_pct is 2"),
        ('interpolation = "x"', "model.interpolation is 'x'"),
        ('crop_mode = "x"', "model.crop_mode is 'x'"),
        ("ema = 1", "model.ema is 1"),
    ],
)
def test_a_recipe_refuses_what_the_commands_refuse(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    key = line.partition(" =")[0]
    kept = [each for each in RECIPE.splitlines() if not each.startswith(f"{key} =")]
    path.write_text("\n".join(kept).replace("[model]", f"[model]\n{line}"))
    with pytest.raises(BadInput, match=said.replace("[", r"\[")):
        load_recipe(path)
