"""corp_deploy.ship: models, inputs and labels in memory become a release that the command `release` repeats."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import corp_deploy
from corp_deploy.release import steps
from corp_deploy.release.incremental import Outcome
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.store.checkpoint import load_checkpoint, save
from tests import tiny
from tests.command import run
from tests.refusals import rejects

QUICK: dict[str, Any] = {"batches": (2,), "time_limit": 0.5}
IN_MEMORY = Path(".stages") / "in-memory"


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ship") / "dense"
    save(tiny.checkpoint(), path)
    return path


def shipped(*args: Any, warned: list[str] | None = None, **options: Any) -> corp_deploy.Release:
    """Call ship, and add its warnings to `warned`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = corp_deploy.ship(*args, **QUICK | options)
    if warned is not None:
        warned += [str(each.message) for each in caught]
    return made


@pytest.mark.slow("graph")
def test_ship_in_python_resumes_repeats_and_equals_the_command(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels, output = tiny.images(20), [*range(7), *range(7), *range(6)], tmp_path / "shipped"
    warned: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(steps, "write_parity", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shipped(dense, images, output, labels=labels)
    made = shipped(dense, torch.from_numpy(images), output, labels=np.asarray(labels), warned=warned)
    assert "parity.min_agreement 98 % can't be shown by 10 held-out images" in warned[0]
    assert (made.made[0], "reduce" in made.cached, made.blocked) == ("parity", True, {})
    assert made.gate is not None
    assert (made.verdict, made.exit_code) == (made.gate.verdict, made.gate.exit_code)
    assert made.exit_code in (1, 3), "so few images show no agreement of 98 %"
    assert os.fspath(made) == str(output)
    assert all((output / name).is_file() for name in made.files)
    assert {"parity.json", "gate.json", "report.html", "reduced/model.onnx"} <= made.files.keys()
    assert json.loads((output / "parity.json").read_text())["accuracy"]
    written = {path: path.stat().st_mtime_ns for path in (output / IN_MEMORY).iterdir()}
    assert {path.name for path in written} == {"inputs.npy", "labels.npy"}
    again = shipped(dense, images, output, labels=labels)
    assert (again.made, again.files) == ((), made.files)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    done = run("release", output / "recipe.toml", "-o", output, "--trust-paths", "--json")
    assert (done.exit_code, json.loads(done.stdout)["made"]) == (made.exit_code, [])
    assert run("check", output).exit_code == 0, "images and labels are no part of the release"
    np.save(tmp_path / "inputs.npy", images)
    by_command = ("--images", tmp_path / "inputs.npy", "--batch", 2, "--time-limit", 0.5, "-o", tmp_path / "command")
    run("ship", dense, *by_command)
    for name in ("reduced/model.safetensors", "reduced/model.fp16.onnx"):
        assert (output / name).read_bytes() == (tmp_path / "command" / name).read_bytes(), name
    changed = shipped(dense, tiny.images(21)[1:], output, labels=labels)
    assert ("moments" in changed.made, "dense" in changed.cached) == (True, True)
    assert "corp-deploy" not in capsys.readouterr().out


def recipe_of(monkeypatch: pytest.MonkeyPatch, model: Any, inputs: Any, output: Path, **options: Any) -> Any:
    """Run ship until its first stage, and return its recipe."""
    with monkeypatch.context() as patched:
        patched.setattr("corp_deploy.release.release_steps.write_dense", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shipped(model, inputs, output, **options)
    return load_recipe(output / "recipe.toml", trust_paths=True)


def test_recipe_names_stored_images_and_labels_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 40, 40, 3)).astype(np.uint8)
    rows = {"image": [Image.fromarray(each) for each in pixels], "label": [place % 7 for place in range(20)]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    module = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=7).eval()
    stored = datasets.Dataset.from_dict(rows, features=features)
    recipe = recipe_of(monkeypatch, module, stored, tmp_path / "out", labels="label")
    assert recipe.calibration.images == tmp_path / "out" / IN_MEMORY / "inputs.parquet"
    assert recipe.held_out.labels.name == "label"


def test_recipe_names_what_was_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=7).eval()
    output, held_out = tmp_path / "out", tiny.images(15)
    labels = {str(place): place % 7 for place in range(15)}
    given = {"held_out": held_out, "labels": labels, "within": "error 0.05", "target": "openvino", "precision": "fp32"}
    recipe = recipe_of(monkeypatch, module, tiny.images(20), output, **given)
    folder = output / IN_MEMORY
    assert recipe.calibration.images == folder / "inputs.npy"
    assert (recipe.held_out.images, recipe.held_out.labels) == (folder / "held_out.npy", folder / "labels.json")
    assert json.loads((folder / "labels.json").read_text()) == labels
    assert np.array_equal(np.load(folder / "held_out.npy"), held_out)
    assert recipe.model.directory == folder / "model"
    assert (str(recipe.reduce.within), recipe.export.precisions, recipe.bench.batches) == (
        "error 0.05",
        ("fp32",),
        (2,),
    )
    assert [each.name for each in recipe.targets] == ["openvino"]
    built = load_checkpoint(recipe.model.directory).model
    with torch.inference_mode():
        torch.testing.assert_close(built(torch.ones(1, 3, 32, 32)), module(torch.ones(1, 3, 32, 32)))
    stamp = (folder / "model" / "config.json").stat().st_mtime_ns
    recipe_of(monkeypatch, module, tiny.images(20), output, **given)
    assert (folder / "model" / "config.json").stat().st_mtime_ns == stamp


def test_loaders_are_written_once_with_their_labels(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release of a loader has the files that arrays of the same images and labels give."""
    images, labels = tiny.images(20), np.arange(20) % 7
    loader = DataLoader(TensorDataset(torch.from_numpy(images), torch.from_numpy(labels)), batch_size=8)
    named = [{"picture": images[start : start + 8], "kind": labels[start : start + 8]} for start in range(0, 20, 8)]
    once = ((images[start : start + 8], labels[start : start + 8]) for start in range(0, 20, 8))
    recipe_of(monkeypatch, dense, images, tmp_path / "arrays", labels=labels)
    for place, (inputs, options) in enumerate([(loader, {}), (named, {"labels": "kind"}), (once, {})]):
        recipe = recipe_of(monkeypatch, dense, inputs, tmp_path / f"{place}", **options)
        assert recipe.held_out.labels == tmp_path / f"{place}" / IN_MEMORY / "labels.npy"
        for name in ("inputs.npy", "labels.npy"):
            made, same = (tmp_path / each / IN_MEMORY / name for each in (f"{place}", "arrays"))
            assert made.read_bytes() == same.read_bytes(), (place, name)


class Net(torch.nn.Module):
    input_size = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(48, 8), torch.nn.Linear(8, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(torch.relu(self.up(images.flatten(1)[:, :48]))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": tiny.images(15)}, "^inputs: 15 images, too few to hold some out .*, or others as `held_out`$"),
        ({"inputs": [1, object()]}, "^inputs: got list of object, expected a path"),
        ({"held_out": iter([])}, "^held_out: got list_iterator without a batch"),
        ({"labels": [0.5] * 20}, r"^held_out.labels: labels: got float64 \[20\] with fractions"),
        ({"labels": [0, 1]}, "^held_out.labels: labels: 2 labels for 20 images"),
        ({"macs": 0.5, "params": 0.5}, "`macs` and `params` are several budgets"),
        ({"latency": 0.5}, "`latency` needs `latency_tables=DIR`"),
        ({"within": "error 0.05"}, "chooses the model on images held out of `inputs`.* give others as `held_out`$"),
        ({"model": Net()}, r"^model: no library makes Net, so a recipe can't name it; .*module:PATH\.py:FUNCTION"),
    ],
)
def test_refusals_write_nothing_and_speak_python(
    dense: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    given = {"model": dense, "inputs": tiny.images(20), **options}
    model, inputs = given.pop("model"), given.pop("inputs")
    rejects(message, shipped, model, inputs, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_stages_for_another_machine_are_a_value(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Outcome(finished=(), cached=(), blocked={"bench.tensorrt": "no GPU"})
    monkeypatch.setattr("corp_deploy.release.run.Job._run_all", lambda *_: blocked)
    warned: list[str] = []
    made = shipped(dense, tiny.images(20), tmp_path / "out", warned=warned)
    assert warned[-1] == "bench.tensorrt: no GPU"
    assert (made.verdict, made.gate, made.exit_code, made.files) == (None, None, 4, {})
    assert made.blocked == blocked.blocked
