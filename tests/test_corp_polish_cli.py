"""`reduce --polish`: its record, the preset that implies it, resumption, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from calib.store import load_moments
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.carried_out import Polishing, inputs_to_polish
from corp_deploy.planning.execution import reduce_checkpoint
from corp_deploy.planning.request import build_request
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import PolishProgress
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.input_sets import images_for_model
from tests import tiny
from tests.command import invoked
from tests.refusals import rejects

NARROW = ("--mlp", 0.5, "--attn", 0.5, "--align", "mlp=8,head=8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a dense model, images, moments m of all images, and moments left-out of all but five."""
    root = tiny.written(tmp_path_factory.mktemp("polish"), 24, init_values=0.5, depth=1)
    for name, more in (("m", ()), ("left-out", ("--hold-out", 5))):
        invoked("calibrate", "--model", root / "dense", "--images", root / "images.npy", "-o", root / name, *more)
    return root


def reduced(home: Path, name: str, *words: object, code: int = 0) -> Result:
    images = ("--images", home / "images.npy")
    where = ("--model", home / "dense", "--moments", home / "m", *images, "-o", home / name)
    return invoked("reduce", *where, *words, code=code)


def choice_of(**options: Any) -> ReduceOptions:
    return ReduceOptions.from_options(options)


def test_reduce_polishes_and_reports_it(home: Path) -> None:
    output = reduced(home, "layer", *NARROW, "--polish", "layer", "--polish-steps", 1).output
    assert "by least squares, without labels" in output
    record = json.loads((home / "layer" / "config.json").read_text())["lineage"]
    assert record["polish"] == "least squares"
    polish = record["reduction"]["polish"]
    assert polish["error"] <= polish["error_before"]
    assert (polish["fitted"], polish["held_out"]) == (21, 3)
    assert [part["steps"] for part in polish["parts"]] == [1] * len(polish["parts"])
    load_checkpoint(home / "layer")
    assert not list(home.glob("*unfinished*"))


@pytest.mark.parametrize("removed", ["block", "model"])
def test_gradient_polish_is_refused_with_the_alternative(removed: str, home: Path) -> None:
    message = reduced(home, "refused", *NARROW, "--polish", removed, code=2).stderr
    assert f"'{removed}' is not one of 'none', 'layer'" in message
    rejects(f"'{removed}': expected one of none, layer", choice_of, mlp=0.5, polish=removed)


@pytest.mark.parametrize("words", [("--polish", "layer"), ("--preset", "thorough")])
def test_polish_without_images_is_refused(words: tuple[object, ...], home: Path) -> None:
    where = ("--model", home / "dense", "--moments", home / "m", "-o", home / "refused")
    message = invoked("reduce", *where, *NARROW, *words, code=2).stderr
    assert "--polish" in message
    assert "give them with --images" in message


def test_interrupted_polish_resumes_to_equal_bytes(home: Path) -> None:
    dense = load_checkpoint(home / "dense")
    choice = choice_of(mlp=0.5, attn=0.5, align={"mlp": 8, "head": 8}, polish="layer", polish_steps=1)
    images = images_for_model(dense.model, home / "images.npy")

    class Stopped(Exception):
        """An interruption of the polish."""

    def stop(progress: PolishProgress) -> None:
        if progress.share > 0.5:
            raise Stopped

    def run(name: str, done: Any = None) -> bytes:
        state = home / "state.safetensors"
        how = Polishing(state=state, on_progress=done)
        file, directory = home / "m", home / name
        reduce_checkpoint(dense, file, choice, directory=directory, images=images, polishing=how)
        assert not state.exists()
        return (home / name / "model.safetensors").read_bytes()

    whole = run("whole")
    with pytest.raises(Stopped):
        run("resumed", stop)
    assert (home / "state.safetensors").exists()
    assert not (home / "resumed").exists()
    assert run("resumed") == whole


def test_thorough_preset_is_best_with_closed_loop_and_polish() -> None:
    plain, thorough = choice_of(macs=0.66), choice_of(preset="thorough", macs=0.66)
    assert thorough.method == plain.method
    assert (thorough.loop, thorough.polishing) == ("asymmetric", "layer")
    assert (plain.loop, plain.polishing) == (None, "none")
    assert thorough.needs_images
    assert thorough.polish_options == PolishOptions()
    other = choice_of(preset="thorough", macs=0.66, closed_loop="symmetric", polish_steps=9)
    assert (other.loop, other.polishing, other.polish_steps) == ("symmetric", "layer", 9)
    neither = choice_of(preset="thorough", macs=0.66, closed_loop="none", polish="none")
    assert (neither.loop, neither.polishing) == (None, "none")


def test_images_held_out_of_calibration_judge_the_polish(home: Path) -> None:
    dense = load_checkpoint(home / "dense")
    images = images_for_model(dense.model, home / "images.npy")
    left_out = load_moments(home / "left-out")
    asked = build_request(choice_of(mlp=0.5, polish="layer"))
    inputs = inputs_to_polish(asked, images, left_out, None)
    assert inputs is not None
    assert inputs.judges is not None
    assert (inputs.reduced_on.count, inputs.fitted.count, inputs.judges.count) == (19, 19, 5)
    assert set(inputs.judges.ids.tolist()).isdisjoint(left_out.image_ids.tolist())
    undivided = inputs_to_polish(asked, images, load_moments(home / "m"), None)
    assert undivided is not None
    assert (undivided.fitted.count, undivided.judges, undivided.groups_B) == (24, None, None)
    assert inputs_to_polish(build_request(choice_of(mlp=0.5)), images, left_out, None) is None
