"""`--effort`: its candidates, the images that judge them, and its refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

import corp_deploy
from calib.fingerprints import Fingerprints
from calib.store import load_moments
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning import carried_out
from corp_deploy.planning.curves import compute_site_metrics
from corp_deploy.planning.probe_split import draw_inputs, set_apart
from corp_deploy.planning.request import build_request
from corp_deploy.polish.options import PolishOptions
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.input_sets import images_for_model
from ground.errors import BadInput
from tests import tiny
from tests.command import invoked, refuses

ALIGN = ("--align", "mlp=8,head=8")
UNIFORM = ("--mlp", 0.5, "--attn", 0.5, *ALIGN, "--effort", "standard")
ONE, LOOP = "one pass over the moments", "the closed loop"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("effort"), 40, init_values=0.5)
    (root / "labels.json").write_text(json.dumps([str(place // 4) for place in range(40)]))
    for name, more in (("m", ()), ("grouped", ("--groups", root / "labels.json"))):
        invoked("calibrate", "--model", root / "dense", "--images", root / "images.npy", "-o", root / name, *more)
    return root


def reduced(home: Path, name: str, *words: object, moments: str = "m") -> Result:
    where = ("--model", home / "dense", "--moments", home / moments, "--images", home / "images.npy", "-o", home / name)
    return invoked("reduce", *where, *words)


def record_of(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / "config.json").read_text())["lineage"]["reduction"]
    return record


def fake_errors(monkeypatch: pytest.MonkeyPatch, *errors: float) -> None:
    """Replace the measured errors of one pass and of the closed loop."""
    remaining = iter(errors)
    monkeypatch.setattr(carried_out, "_output_error", lambda *_: next(remaining))


def reduce_by_hand(home: Path, way: str, *, every: bool, name: str = "m") -> tuple[torch.nn.Module, float, int]:
    """Return a uniform reduction, fitted to the judging images too if `every`, its error on them and their number."""
    dense, moments = load_checkpoint(home / "dense"), load_moments(home / name)
    options = {"mlp": 0.5, "attn": 0.5, "align": {"mlp": 8, "head": 8, "conv": 32}}
    images, method = images_for_model(dense.model, home / "images.npy"), ReduceOptions.from_options(options).method
    apart = set_apart(dense, moments, images)
    metrics = compute_site_metrics(dense.model, method, draw_inputs(dense, apart.loop_images))
    fitted, others = (moments, images) if every else (apart.moments, apart.others)
    if way == ONE:
        model = reduce(dense.model, replace(fitted, metrics=metrics), method).model
    else:
        loop = Loop(half_ids=None if fitted.half is None else fitted.half.image_ids)
        model = reduce_traced(dense.model, others, method, loop=loop, metrics=metrics).model
    places = (~torch.isin(images.ids, apart.others.ids)).nonzero().squeeze(1).tolist()
    assert not torch.isin(images.subset(places).ids, apart.moments.image_ids).any()
    (judges,) = images.subset(places).batches(len(places))
    exact, answer = (tiny.ran(each.eval(), torch.as_tensor(judges)) for each in (dense.model, model))
    return model, tiny.relative(answer, exact), len(places)


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", ["m", "grouped"])
def test_candidates_are_judged_on_unfitted_images_and_the_better_one_is_kept(name: str, home: Path) -> None:
    """Trials choose ridges by halves of groups, as the kept reduction does."""
    assert (load_moments(home / name).half is not None) == (name == "grouped")
    reduced(home, f"uniform-{name}", *UNIFORM, moments=name)
    record = record_of(home / f"uniform-{name}")
    by_name = {stage["name"]: stage for stage in record["stages"]}
    found = {way: reduce_by_hand(home, way, every=False, name=name)[1:] for way in (ONE, LOOP)}
    errors, (count,) = {way: error for way, (error, _) in found.items()}, {count for _, count in found.values()}
    assert {way: stage["error"] for way, stage in by_name.items()} == pytest.approx(errors, rel=1e-4)
    kept = min(errors, key=lambda way: errors[way])
    assert [name for name, stage in by_name.items() if stage["kept"]] == [kept]
    (line,) = [each for each in record["decided"] if each.startswith(f"effort standard, judged on {count} images")]
    assert all(f"{way} errs {by_name[way]['error']:.4f} (" in line for way in (ONE, LOOP))
    assert f"; {kept} is kept" in line


@pytest.mark.parametrize(
    ("way", "errors", "most_apart", "every"),
    [
        (ONE, (0.1, 0.2), 0.1, True),
        pytest.param(LOOP, (0.2, 0.1), 0.1, True, marks=pytest.mark.slow("models")),
        pytest.param(LOOP, (0.2, 0.1), 0.2, False, marks=pytest.mark.slow("models")),
    ],
)
def test_winner_is_refitted_to_all_images(
    way: str, errors: tuple[float, float], most_apart: float, every: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_errors(monkeypatch, *errors)
    monkeypatch.setattr(carried_out, "MOST_APART", most_apart)
    name = f"{way[-4:]}-{every}"
    reduced(home, name, *UNIFORM)
    state, expected = (
        load_checkpoint(home / name).model.state_dict(),
        reduce_by_hand(home, way, every=every)[0].state_dict(),
    )
    assert state.keys() == expected.keys()
    for key, tensor in state.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.slow("models")
def test_thorough_budget_is_polished_and_tries_widths_in_loops(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_errors(monkeypatch, 0.2, 0.1)
    reduced(home, "thorough", "--macs", 0.7, "--effort", "thorough", "--polish-steps", 1, *ALIGN)
    record = record_of(home / "thorough")
    assert record["polish"]["error"] <= record["polish"]["error_before"]
    assert any("the closed loop is kept, its widths tried in loops" in line for line in record["decided"])
    request = build_request(ReduceOptions.from_options({"macs": 0.7, "effort": "thorough", "polish_steps": 2}))
    assert request.options.polish_options == PolishOptions(steps=2)


def test_few_images_are_reduced_in_one_pass_and_reported(home: Path) -> None:
    reduced(home, "plain", *UNIFORM, "--samples", 12)
    record = record_of(home / "plain")
    assert "stages" not in record
    decision = "effort standard: of 12 images none can be set apart to judge, so one pass over the moments"
    assert decision in record["decided"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"closed_loop": "asymmetric"}, "--closed-loop: --effort standard settles that by trying it"),
        ({"polish": "none"}, "--polish: --effort standard settles that by trying it"),
        ({"preset": "thorough"}, "preset thorough says what is composed; give one of both"),
        ({"mlp": None, "within": "error 0.1"}, "--within tries budgets in one way"),
        ({"held_out": "moments"}, "sets images apart to judge by; leave --held-out out"),
        ({"residual": 0.5}, "of which --residual removes channels"),
        ({"mlp": None, "sparse": "2:4"}, "nothing is repaired where weights alone are set to zero"),
        ({"rescale": True}, "--rescale has no effect on the closed loop"),
        ({"polish_steps": 3}, "has no effect on a reduction that is not polished"),
    ],
)
def test_effort_refuses_options_it_chooses_or_cannot_judge(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ReduceOptions.from_options({"mlp": 0.5, "effort": "standard"} | options)


def test_effort_needs_images_and_quick_tries_nothing() -> None:
    assert ReduceOptions.from_options({"mlp": 0.5, "effort": "standard"}).needs_images
    quick = ReduceOptions.from_options({"mlp": 0.5})
    assert (quick.effort, quick.composes, quick.needs_images) == ("quick", False, False)


def test_images_that_may_be_fitted_do_not_judge(home: Path) -> None:
    dense, moments = load_checkpoint(home / "dense"), load_moments(home / "m")
    images = images_for_model(dense.model, home / "images.npy")
    apart = set_apart(dense, moments, images)
    assert carried_out._count_judges(apart, images) == 8
    assert carried_out._count_judges(replace(apart, moments=moments), images) == 0
    unknown = replace(apart.moments, fingerprints=Fingerprints())
    assert carried_out._count_judges(replace(apart, moments=unknown), images) == 0


@pytest.mark.parametrize("effort", ["standard", "thorough"])
def test_effort_without_images_is_refused(effort: Any, home: Path) -> None:
    words = ("--model", home / "dense", "--moments", home / "m", "-o", home / "never", *ALIGN)
    refuses("--effort", "reduce", *words, "--mlp", 0.5, "--effort", effort)
    with pytest.raises(BadInput, match="images"):
        corp_deploy.reduce(home / "dense", home / "m", home / "never", mlp=0.5, effort=effort)
    assert not (home / "never").exists()
