"""`ship`, from a model and images to a release and its recipe, and models that a file names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

import corp_deploy
from corp_deploy.release import steps
from corp_deploy.release.incremental import Stage, StageStatus
from corp_deploy.release.pace import Pace
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.store.checkpoint import load_checkpoint, save
from tests import tiny
from tests.command import invoked, refuses, run
from tests.encoders import write_encoder
from tests.refusals import rejects

KWARGS = json.dumps(dict(tiny.ARCHITECTURE.kwargs))
QUICK = ("--batch", "2", "--time-limit", "0.5")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model's weights, the same model as a directory, and images with and without copies."""
    root = tmp_path_factory.mktemp("ship")
    checkpoint = tiny.checkpoint()
    save(checkpoint, root / "dense")
    save_file(checkpoint.model.state_dict(), root / "weights.safetensors")
    np.save(root / "images.npy", tiny.images(20))
    np.save(root / "few.npy", tiny.images(15))
    np.save(root / "copies.npy", tiny.images(15)[np.arange(30) % 15])
    np.save(root / "some-copies.npy", tiny.images(16)[np.arange(40) % 16])
    return root


def model_words(home: Path) -> tuple[object, ...]:
    return tiny.ARCHITECTURE.name, "--weights", home / "weights.safetensors", "--model-kwargs", KWARGS


def ship(home: Path, output: Path, *words: object) -> Any:
    return run("ship", *model_words(home), "--images", home / "images.npy", *QUICK, "-o", output, *words)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def made_and_cached(done: Any) -> tuple[list[str], list[str]]:
    record = json.loads(done.stdout)
    return record["made"], record["cached"]


@pytest.mark.slow("graph")
def test_ship_makes_resumes_and_updates_a_release(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is interrupted and resumed; the next one finds nothing to do, and then a changed recipe."""
    output = tmp_path / "shipped"
    with monkeypatch.context() as patched:
        patched.setattr(steps, "write_parity", interrupt)
        assert ship(home, output).exit_code == 130
    assert not (output / "parity.json").exists()
    done = ship(home, output, "--json")
    assert done.exit_code in (1, 3), "so few images show no agreement of 98 %"
    made, kept = made_and_cached(done)
    assert (made[0], "reduce" in kept) == ("parity", True)
    for name in ("reduced/model.fp16.onnx", "bench.json", "report.html", "SHA256SUMS"):
        assert (output / name).exists(), name
    assert (output / "repository").exists() == (done.exit_code == 3), "a failed model isn't packed"
    assert load_checkpoint(output / "reduced").model is not None
    again = ship(home, output)
    assert "nothing to do" in again.stdout
    words = again.stdout.partition("only what changed: ")[2].split("\n")[0].split()
    assert (words[:2], words[-1]) == (["corp-deploy", "release"], "--trust-paths")
    text = (output / "recipe.toml").read_text()
    (output / "recipe.toml").write_text(text.replace("max_error = 0.05", "max_error = 0.5"))
    changed = run(*words[1:], "--json")
    assert made_and_cached(changed)[0] == ["recipe", "parity", "gate", "package", "report", "manifest"]
    assert ship(home, output).exit_code == changed.exit_code, "keys without an option may be changed"
    other = ship(home, output, "--macs", 0.5)
    assert other.exit_code == 2
    assert "reduce.macs is 0.7 there, 0.5 here; change it there and run `corp-deploy release" in other.stderr
    assert load_recipe(output / "recipe.toml", trust_paths=True).reduce.macs == 0.7


def recipe_of(home: Path, output: Path, monkeypatch: pytest.MonkeyPatch, *words: object) -> Any:
    """Run ship until its first stage, and return its recipe."""
    monkeypatch.setattr("corp_deploy.release.release_steps.write_dense", interrupt)
    assert ship(home, output, *words).exit_code == 130
    return load_recipe(output / "recipe.toml", trust_paths=True)


def test_recipe_states_the_requested_options(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(home, tmp_path / "a b", monkeypatch)
    assert (recipe.calibration.hold_out, recipe.held_out.images, recipe.reduce.macs) == (10, None, 0.7)
    assert recipe.gate.rules == ("speedup@b2 < 1.0", "top1_agreement < 0.98")
    assert (recipe.parity.min_agreement, recipe.parity.max_error) == (0.98, 0.05)
    assert [each.name for each in recipe.targets] == ["onnxruntime-cpu"]
    assert (recipe.name, recipe.package.name) == ("a-b", "a-b")
    assert recipe.model.opened().lineage["source"]["weights"] == "weights.safetensors"
    others = ("--held-out", home / "few.npy", "--params", 0.6, "--target", "openvino", "--precision", "fp32")
    recipe = recipe_of(home, tmp_path / "b", monkeypatch, *others, "--samples", 12, "--seed", 3, "--launches", 4)
    assert (recipe.calibration.hold_out, recipe.held_out.images) == (None, (home / "few.npy").resolve())
    assert (recipe.reduce.macs, recipe.reduce.params, recipe.export.precisions) == (None, 0.6, ("fp32",))
    assert ([each.name for each in recipe.targets], recipe.calibration.samples) == (["openvino"], 12)
    assert recipe.bench.launches == 4


def test_limit_is_judged_on_images_that_do_not_prove_the_result(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--within", "error 0.05", "--held-out", home / "few.npy")
    recipe = recipe_of(home, tmp_path / "out", monkeypatch, *words)
    assert (str(recipe.reduce.within), recipe.reduce.macs, recipe.reduce.effort) == ("error 0.05", None, "quick")
    assert (recipe.calibration.hold_out, recipe.held_out.images) == (10, (home / "few.npy").resolve())
    assert "interrupted" in ship(home, tmp_path / "out", *words).stderr, "the existing recipe is used"
    message = ship(home, tmp_path / "out", "--within", "error 0.1", "--held-out", home / "few.npy").stderr
    assert "reduce.within is error 0.05 there, error 0.1 here" in message


def test_fastest_available_target_is_chosen(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"tensorrt": "none", "tensorrt-rtx": None, "onnxruntime-cuda": None}
    monkeypatch.setattr("corp_deploy.release.ship.missing_to_run", lambda target: here[target.name])
    (target,) = recipe_of(home, tmp_path / "out", monkeypatch).targets
    assert (target.name, target.precision) == ("tensorrt-rtx", "fp16")


def test_untyped_paths_stay_in_the_directory(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    recipe_of(home, output, monkeypatch)
    text = (output / "recipe.toml").read_text()
    for history, message in (("../history", f"gate.history leads out of {output}"), ("history", "interrupted")):
        (output / "recipe.toml").write_text(text.replace("[gate]", f'[gate]\nhistory = "{history}"'))
        assert message in ship(home, output).stderr


def test_features_are_judged_by_relative_error(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(home, tmp_path / "out", monkeypatch, "--outputs", "class,patches")
    assert (recipe.parity.min_agreement, recipe.gate.rules) == (None, ("speedup@b2 < 1.0",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--images", "few.npy"), "15 images, too few to hold some out that prove the result; give 16 or more"),
        (("--images", "copies.npy"), "30 images, copies of 15 different ones, too few to hold some out that prove"),
        (("--images", "nowhere"), "nowhere"),
        (("--within", "error 0.05"), "so that they can't prove it too; give others as --held-out"),
        (("--within", "error 0.05", "--macs", 0.5), "--within chooses the budget itself; give it without --macs"),
        (("--macs", 0.5, "--params", 0.5), "--macs and --params are several budgets; give one"),
        (("--precision", "int8,fp16"), "also of those that calibration.hold_out leaves out to prove the result"),
        (("--held-out", "nowhere.npy"), "Error: held_out.images: "),
        (("--labels", "few.npy"), "Error: held_out.labels: "),
    ],
)
def test_bad_input_gives_one_message_and_writes_nothing(
    home: Path, tmp_path: Path, words: tuple[object, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    before = sorted(home.iterdir())
    done = ship(home, tmp_path / "out", *words)
    assert (done.exit_code, message in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert not (tmp_path / "out").exists()
    assert sorted(home.iterdir()) == before


def test_name_without_weights_explains_both_options(home: Path, tmp_path: Path) -> None:
    for message in ("needs --weights", ".model.toml that calibrate writes"):
        refuses(message, "ship", tiny.ARCHITECTURE.name, "--images", home / "images.npy", "-o", tmp_path / "out")


def test_half_of_the_distinct_images_is_held_out(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(home, tmp_path / "out", monkeypatch, "--images", home / "some-copies.npy")
    assert recipe.calibration.hold_out == 8


def test_text_models_are_referred_to_the_single_steps(home: Path, tmp_path: Path) -> None:
    write_encoder(tmp_path / "bert")
    words = ("ship", f"hf:{tmp_path / 'bert'}", "--images", home / "images.npy", "-o", tmp_path / "out")
    refuses("takes text, and a release needs a model of images", *words)


# Progress and the remaining time


def test_remaining_time_is_estimated(tmp_path: Path) -> None:
    lines: list[str] = []
    times = iter((0.0, 100.0, 100.0, 101.0, 131.0))
    pace = Pace(lines.append, clock=lambda: next(times))
    names = ("dense", "moments", "export.dense", "reduce")
    states: Any = dict(zip(names, ("runs", "runs", "cached", "follows"), strict=True))
    pace.plan([StageStatus(stage=name, state=state, why="") for name, state in states.items()])
    stages = {name: Stage(name=name, outputs=(name,), run=lambda dirs: None) for name in names}
    pace(stages["dense"], "not done yet")
    pace(stages["moments"], "not done yet")
    pace(stages["moments"], "half of it")
    pace(stages["reduce"], "changed")
    assert lines == [
        "[1 of 3, 0:00 so far] dense",
        "[2 of 3, 0:01 so far] moments",
        "moments: half of it",
        f"[3 of 3, 0:31 so far, about 0:{31 * 25 // 21} left by estimate] reduce: changed",
    ]


def _paced(names: Sequence[str], times: Sequence[float], started: Sequence[str], **seconds: float) -> list[str]:
    """Return the progress lines of open stages, of which some start, the first at `times[2]`."""
    lines, clock = list[str](), iter(times)
    pace = Pace(lines.append, seconds=seconds, clock=lambda: next(clock))
    pace.plan([StageStatus(stage=name, state="runs", why="") for name in names])
    for name in started:
        pace(Stage(name=name, outputs=(name,), run=lambda dirs: None), "not done yet")
    return lines


def test_cached_stages_do_not_enter_the_time_estimate() -> None:
    lines = _paced(("moments", "reduce", "parity", "export.dense"), (0, 0, 0, 30), ("parity", "export.dense"))
    assert lines[1] == "[4 of 4, 0:30 so far, about 0:10 left by estimate] export.dense"


def test_time_estimate_uses_the_measurement_limit() -> None:
    lines = _paced(("parity", "bench", "gate"), (0, 0, 0, 60), ("parity", "bench"), bench=8.0)
    assert lines[1] == "[2 of 3, 1:00 so far, about 0:13 left by estimate] bench"


# A model that a file names


@pytest.fixture(scope="module")
def model_file(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate a model, and return the file of the model beside the moments."""
    folder = tmp_path_factory.mktemp("moments")
    words = ("--images", home / "images.npy", "--mean", "0.4", "-o", folder / "m.safetensors")
    done = invoked("calibrate", "--model", *model_words(home), *words)
    assert f"{folder / 'm.model.toml'}: the model, for --model of the next commands" in done.stdout
    return folder / "m.model.toml"


def test_every_command_accepts_a_model_file(home: Path, model_file: Path, tmp_path: Path) -> None:
    assert "mean 0.4" in invoked("inspect", "--model", model_file).stdout
    reduced = tmp_path / "reduced"
    moments = model_file.with_name("m.safetensors")
    invoked("reduce", "--model", model_file, "--moments", moments, "--mlp", 0.5, "-o", reduced)
    images = ("--images", home / "images.npy", "--max-error", 9, "--batch", 2)
    invoked("verify", model_file, reduced, *images, "-o", tmp_path / "parity.json")
    where = ("--backend", "torch", "--batch", 1, "--time-limit", 0.5, "--half-width", 0.9, "--min-rounds", 6)
    bench = tmp_path / "bench.json"
    invoked("bench", model_file, reduced, *where, "--block-ms", 1, "-o", bench)
    weights = json.loads((reduced / "config.json").read_text())
    assert weights["lineage"]["source"]["weights"] == "weights.safetensors"
    invoked("calibrate", "--model", home / "dense", "--images", home / "images.npy", "-o", tmp_path / "m.safetensors")
    invoked("calibrate", "--model", model_file, "--images", home / "images.npy", "-o", tmp_path / "n.safetensors")
    assert (tmp_path / "n.safetensors").read_bytes() == moments.read_bytes()
    assert not list(tmp_path.glob("*.model.toml")), "a directory or a file needs no other file of the model"
    assert corp_deploy.load(model_file).state_dict().keys() == tiny.checkpoint().model.state_dict().keys()


def test_recipe_accepts_a_model_file(home: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(f'[model]\nmodel = "{home}/dense"\n[calibration]\nimages = "nowhere"\n')
    shown = [invoked("inspect", "--model", model).stdout for model in (tmp_path / "recipe.toml", home / "dense")]
    assert shown[0] == shown[1]


def test_missing_file_is_not_taken_for_a_recipe(tmp_path: Path) -> None:
    message = "no such file; calibrate writes it beside its moments"
    refuses(message, "inspect", "--model", tmp_path / "moments.model.toml")


def test_model_without_option_is_told_to_use_model() -> None:
    for words in (("inspect", "vit_tiny_patch16_224"), ("calibrate", "vit_tiny_patch16_224", "--samples", "2")):
        refuses("Missing option '--model'; did you mean --model vit_tiny_patch16_224?", *words)
    assert "did you mean" not in run("inspect").stderr


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", ("--mean", "0.5"), "has the model's options in [model]; leave --mean out"),
        ("", ("--weights", "w.pth"), "leave --weights out, or change [model]"),
        ('[calibration]\nimages = "x"\n', (), "has no [model]"),
        ('[model]\nmodel = "x"\nweight = "w.pth"\n', (), "unknown key 'weight'; did you mean 'weights'?"),
        (None, (), "no such recipe"),
    ],
)
def test_files_that_declare_no_model_are_refused(
    model_file: Path, tmp_path: Path, text: str | None, words: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "model.toml"
    if text is not None:
        path.write_text(text or model_file.read_text())
    refuses(message, "inspect", "--model", path, *words)
    rejects(r"model\.toml", corp_deploy.load, corp_deploy.Source(path, mean=(0.5,)))
