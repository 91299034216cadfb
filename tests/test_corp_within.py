"""The smallest model within a limit: bisection beside a scan of all budgets, who judges, what is refused."""

import copy
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from click.testing import Result
from torch import nn

from calib.fingerprints import Fingerprints
from calib.images import Images
from calib.moments import Moments
from calib.store import save_moments
from corp_deploy.invocation.budget_choice import Limit, limit_from_text
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning import carried_out, execution, limit_search
from corp_deploy.planning.budget_planner import BudgetPlanner, build_budget_planner
from corp_deploy.planning.judging import Judge, JudgeChoice, Judgement, JudgingInputs
from corp_deploy.planning.limit_search import STEPS, find_smallest_within
from corp_deploy.planning.request import ReductionRequest, WidthPlan
from corp_deploy.planning.sweep_points import SweepPoint, describe_sweep, smallest_by_error
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.input_sets import images_for_model
from ground.errors import BadInput
from tests.refusals import rejects

from . import tiny
from .command import invoked

# Without constants what two blocks lose is monotone in the budget.
METHOD = method_from_preset("best", align_hidden=8, align_head=8, empties=False)
FITTED, JUDGING = 24, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A dense model, its images, of which the moments are of the first ones alone, and labels of all."""

    directory: Path
    dense: Checkpoint
    images: Images
    labels_N: np.ndarray[Any, np.dtype[np.int64]]
    moments: Moments

    @property
    def fitted(self) -> Images:
        return self.images.subset(range(FITTED))

    @property
    def others(self) -> Images:
        return self.images.subset(range(FITTED, FITTED + JUDGING))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    directory, dense = tmp_path_factory.mktemp("within"), tiny.checkpoint()
    pixels = tiny.images(FITTED + JUDGING)
    np.save(directory / "images.npy", pixels)
    np.save(directory / "others.npy", tiny.images(12, seed=3))
    labels_N = tiny.ran(dense.model, pixels).argmax(1).numpy()
    labels_N[-4:] = (labels_N[-4:] + 1) % 7  # the dense model is wrong on four
    np.save(directory / "labels.npy", labels_N)
    images = images_for_model(dense.model, directory / "images.npy")
    moments = calibrate(dense, images.subset(range(FITTED)), batch_size=8)
    save(dense, directory / "dense")
    save_moments(moments, directory / "moments.safetensors")
    return Home(directory=directory, dense=dense, images=images, labels_N=labels_N, moments=moments)


@pytest.fixture(scope="module")
def planner(home: Home) -> BudgetPlanner:
    with torch.inference_mode():
        request = ReductionRequest(options=ReduceOptions(macs=0.5), method=METHOD)
        return build_budget_planner(home.dense, home.moments, request, home.fitted)


def reduced(home: Home, planned: WidthPlan) -> Reduction:
    return reduce(home.dense.model, home.moments, METHOD, widths=planned.widths, eliminations=planned.eliminations)


@pytest.fixture(scope="module")
def scan(home: Home, planner: BudgetPlanner) -> dict[float, nn.Module]:
    """The model of every budget that any widths can meet."""
    shares = [step / STEPS for step in range(1, STEPS) if step / STEPS >= planner.narrowest()]
    return {share: reduced(home, planner.widths_at(share)).model for share in shares}


def logits(model: nn.Module, images: Images) -> np.ndarray[Any, np.dtype[np.float64]]:
    with torch.inference_mode():
        return np.concatenate([model(batch).double().numpy() for batch in images.batches(7)])


def measured_by_hand(home: Home, model: nn.Module, measure: str) -> float:
    dense, outputs = logits(home.dense.model, home.others), logits(model, home.others)
    if measure == "error":
        return float(np.sqrt(((outputs - dense) ** 2).sum() / (dense**2).sum()))
    top, dense_top, labels = outputs.argmax(1), dense.argmax(1), home.labels_N[FITTED:]
    if measure == "agreement":
        return sum(int(a == b) for a, b in zip(top, dense_top, strict=True)) / JUDGING
    return 100.0 * (int((top == labels).sum()) - int((dense_top == labels).sum())) / JUDGING


@pytest.mark.slow("models")
@pytest.mark.parametrize("text", ["error 0.06", "error 0.1", "error 0.3", "agreement 0.95", "accuracy -5"])
def test_bisection_equals_a_scan_of_all_budgets(
    home: Home, planner: BudgetPlanner, scan: dict[float, nn.Module], text: str
) -> None:
    limit = limit_from_text(text)
    _, judging = JudgeChoice(labels_N=home.labels_N).apart(home.images, home.moments)
    result, planned = find_smallest_within(limit, planner, judging, lambda plan: reduced(home, plan))
    record = cast(dict[str, Any], planned.within)
    answer = min((trial for trial in record["trials"] if trial["holds"]), key=lambda trial: trial["share"])
    by_hand = {share: measured_by_hand(home, model, limit.measure) for share, model in scan.items()}
    # The answer is on an edge of the scan: it holds, and the budget one step below does not.
    holding = {share for share, value in by_hand.items() if limit.holds(value)}
    edges = [share for share in holding if round(share - 1 / STEPS, 2) not in holding]
    assert answer["share"] in edges, (answer, edges)
    if text in ("error 0.06", "error 0.3"):  # monotone there, so that there is one edge
        assert len(edges) == 1, edges
    assert answer["judged"]["value"] == pytest.approx(by_hand[answer["share"]], rel=1e-5)
    assert measured_by_hand(home, result.model, limit.measure) == pytest.approx(by_hand[answer["share"]], rel=1e-6)
    assert answer["judged"]["low"] <= answer["judged"]["value"] <= answer["judged"]["high"]
    assert len(record["trials"]) <= 7
    assert f"{len(record['trials'])} models were reduced and judged" in planned.decisions[0]
    assert f"on {JUDGING} images that the calibration left out" in planned.decisions[0]


class FakeJudge:
    """Of a model that is what it errs by."""

    def __init__(self, *_: object) -> None: ...

    def of(self, model: float) -> Judgement:
        return Judgement(value=model, low=model, high=model)


class FakePlanner:
    """Its plans' first sentence is the share."""

    probe = SimpleNamespace(model=None)
    currency = "macs"

    def widths_at(self, share: float) -> WidthPlan:
        return WidthPlan(method=METHOD, widths={}, decisions=(f"{share}",))

    def narrowest(self) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("limit", "judged", "more"),
    [
        (
            "agreement 0.98",
            (63 / 64, 0.9167, 0.9972),
            "about 3,934 images would decide if the share stays; these are 64",
        ),
        ("error 0.05", (0.045, 0.04, 0.055), "about 256 images would decide; these are 64"),
        ("accuracy -1", (0.0, -2.0, 2.0), "about 256 images would decide; these are 64"),
    ],
)
def test_inconclusive_limits_are_reported_as_in_verify(
    limit: str, judged: tuple[float, float, float], more: str
) -> None:
    value, low, high = judged
    trials = (limit_search.BudgetTrial(share=0.5, judged=Judgement(value=value, low=low, high=high), holds=True),)
    judging = cast(JudgingInputs, SimpleNamespace(inputs=SimpleNamespace(count=64, noun="images")))
    answer = limit_search.LimitSearch(limit=limit_from_text(limit), currency="macs", judging=judging, trials=trials)
    assert f", chosen by the point: the interval straddles the limit; {more})" in str(answer)
    surely = limit_search.BudgetTrial(share=0.5, judged=Judgement(value=value, low=value, high=value), holds=True)
    assert "chosen by the point" not in str(replace(answer, trials=(surely,)))


@pytest.mark.parametrize("seed", range(8))
def test_answer_is_measured_even_if_errors_jump(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(limit_search, "Judge", FakeJudge)
    noise = np.random.default_rng(seed).normal(size=STEPS + 1)
    errors = {step / STEPS: float(0.4 * (1 - step / STEPS) + 0.05 * abs(noise[step])) for step in range(1, STEPS)}

    def as_planned(plan: WidthPlan) -> Reduction:
        return cast(Reduction, SimpleNamespace(model=errors[float(plan.decisions[0])]))

    judging = cast(JudgingInputs, SimpleNamespace(inputs=SimpleNamespace(digest="d", count=1, noun="images")))
    result, plan = find_smallest_within(
        Limit(measure="error", value=0.15), cast(BudgetPlanner, FakePlanner()), judging, as_planned
    )
    share = float(plan.decisions[1])
    assert cast(float, result.model) == errors[share] <= 0.15
    assert share <= 0.26 or errors[round(share - 0.01, 2)] > 0.15


def test_narrowest_widths_are_returned_if_they_hold_and_none_if_no_widths_do(
    home: Home, planner: BudgetPlanner
) -> None:
    _, judging = JudgeChoice().apart(home.images, home.moments)

    def smallest(limit: str) -> tuple[Reduction, WidthPlan]:
        return find_smallest_within(limit_from_text(limit), planner, judging, lambda plan: reduced(home, plan))

    _, plan = smallest("agreement 0.01")
    assert "no widths are narrower" in plan.decisions[0]
    rejects(r"out of reach on 40 images .* keeps 0\.99 of the dense macs and gives", smallest, "error 1e-9")


def test_interval_equals_the_delta_method_over_images(home: Home, planner: BudgetPlanner) -> None:
    """Beside the delta method on the ratio of sums, by hand."""
    _, judging = JudgeChoice().apart(home.images, home.moments)
    model = reduced(home, planner.widths_at(0.8)).model
    judged = Judge(home.dense.model, judging, "error").of(model)
    dense, outputs = logits(home.dense.model, home.others), logits(model, home.others)
    lost, energy = ((outputs - dense) ** 2).sum(1), (dense**2).sum(1)
    ratio = lost.sum() / energy.sum()
    deviation = (lost - ratio * energy).std() / energy.mean() / len(lost) ** 0.5 / (2 * ratio**0.5)
    assert judged.high - judged.low == pytest.approx(2 * 1.96 * deviation, rel=0.2)


def test_fitted_images_never_judge(home: Home) -> None:
    fitted, judging = JudgeChoice().apart(home.images, home.moments)
    assert (fitted.count, judging.inputs.count) == (FITTED, JUDGING)
    assert not torch.isin(judging.inputs.ids, home.moments.image_ids).any()
    rejects(
        "the moments are of all 24 images, so none is left to judge on", JudgeChoice().apart, home.fitted, home.moments
    )
    rejects("none of the 40 images was used in the moments", JudgeChoice().apart, judging.inputs, home.moments)
    with pytest.raises(BadInput, match="--judge: 24 of its 64 images are calibration images too"):
        JudgeChoice(inputs=home.images).apart(home.fitted, home.moments)
    unknown = replace(home.moments, fingerprints=Fingerprints())
    rejects("the moments don't record their images", JudgeChoice().apart, home.images, unknown)


def run(home: Home, output: Path, *words: str, code: int = 0) -> Result:
    asked = ["reduce", "--model", home.directory / "dense", "--moments", home.directory / "moments.safetensors"]
    return invoked(*asked, *words, "--align", "mlp=8,head=8", "-o", output, code=code)


@pytest.fixture
def directory(home: Home, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home.directory)
    return home.directory


@pytest.mark.slow("models")
@pytest.mark.parametrize(
    ("words", "judges"),
    [
        (["--within", "error 0.2", "--images", "images.npy"], "on 40 images that the calibration left out"),
        (["--within", "error 0.2", "--images", "images.npy", "--judge", "others.npy"], "on 12 images of --judge"),
        (["--within", "accuracy -5", "--images", "images.npy", "--labels", "labels.npy"], "points"),
        (["--within", "error 0.2", "--images", "images.npy", "--closed-loop"], "on 40 images"),
        (["--within", "agreement 0.9", "--images", "images.npy", "--json"], "40 images that the calibration left out"),
    ],
)
def test_reduce_reports_the_measurement_and_its_images(
    home: Home, directory: Path, tmp_path: Path, words: list[str], judges: str
) -> None:
    result = run(home, tmp_path / "reduced", *words)
    if "--json" in words:
        assert json.loads(result.stdout)["within"]["judges"] == judges
    assert judges in " ".join(result.output.split())
    record = load_checkpoint(tmp_path / "reduced").lineage["reduction"]["within"]
    assert record["limit"] == words[1]
    assert any(trial["holds"] for trial in record["trials"])


@pytest.mark.parametrize("harms", [False, True])
@pytest.mark.slow("models")
def test_limit_holds_for_the_polished_model(
    home: Home, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harms: bool
) -> None:
    def harmed(_: nn.Module, reduction: Reduction, *__: Any, **___: Any) -> Reduction:
        model = copy.deepcopy(reduction.model)
        for parameter in model.parameters():
            parameter.data.mul_(1.5 if harms else 1.0)
        return replace(reduction, model=model, polish={})

    monkeypatch.setattr(execution, "with_polish", harmed)
    words = ["--within", "error 0.2", "--images", "images.npy", "--polish", "layer"]
    run(home, tmp_path / "reduced", *words)
    written = load_checkpoint(tmp_path / "reduced")
    decided = " ".join(written.lineage["reduction"]["decided"])
    assert ("the polish is left out: it gives" in decided, "after the polish: " in decided) == (harms, not harms)
    assert ("polish" in written.lineage) == (not harms)
    assert measured_by_hand(home, written.model, "error") <= 0.2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--within", "error 2"], "expected error and a number in (0, 1)"),
        (["--within", "agreement 0"], "expected agreement and a share in (0, 1]"),
        (["--within", "accuracy 1"], "expected accuracy and a change in points in (-100, 0]"),
        (["--within", "loss 0.1"], "expected 'error 0.05'"),
        (["--within", "error 0.1 %"], "expected 'error 0.05'"),
        (["--within", "error 0.1", "--macs", "0.5"], "--within chooses the budget itself"),
        (["--within", "error 0.1", "--heads", "auto"], "give --heads padded, square or ragged"),
        (["--within", "error 0.1", "--preset", "corp"], "has no effect on preset corp"),
        (["--within", "error 0.1", "--labels", "labels.npy"], "--labels have no effect on 'error 0.1'"),
        (["--within", "accuracy -1"], "--within accuracy needs --labels"),
        (["--macs", "0.5", "--judge", "others.npy"], "--judge others.npy has no effect on a budget of MACs"),
        (["--within", "error 0.1", "--judge", "images.npy"], "are calibration images too"),
        (["--within", "error 1e-9"], "models tried keeps 0.99 of the dense macs"),
        (["--within", "error 0.1"], "--within fits to calibration images and judges on others"),
    ],
)
def test_meaningless_limit_is_refused_and_nothing_is_written(
    home: Home, directory: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    images = [] if "fits to" in said else ["--images", "images.npy"]
    result = run(home, tmp_path / "reduced", *words, *images, code=2)
    assert said in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_interrupted_search_writes_nothing(
    home: Home, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = 0

    def stopping(*args: Any, **options: Any) -> Reduction:
        nonlocal began
        began += 1
        if began == 3:
            raise KeyboardInterrupt
        return reduce(*args, **options)

    monkeypatch.setattr(carried_out, "reduce", stopping)
    run(home, tmp_path / "reduced", "--within", "error 0.1", "--images", "images.npy", code=130)
    assert began == 3
    assert list(tmp_path.iterdir()) == []


RECIPE = """
[model]
model = "dense"
[calibration]
images = "images.npy"
{calibration}
[held_out]
images = "images.npy"
[reduce]
within = "{within}"
{reduce}
"""


def recipe(directory: Path, within: str, calibration: str = "hold_out = 16", reduce: str = "") -> Path:
    path = directory / "recipe.toml"
    path.write_text(RECIPE.format(within=within, calibration=calibration, reduce=reduce))
    return path


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ("error 0.1", "hold_out = 16", "macs = 0.5"),
            "within chooses the budget itself; give it without reduce.macs",
        ),
        (("error 0.1", ""), "is judged on images held out; give calibration.hold_out"),
        (("accuracy -1",), "needs labels of the images that calibration.hold_out leaves out"),
    ],
)
def test_recipe_refuses_limits_it_cannot_judge(
    directory: Path, tmp_path: Path, asked: tuple[str, ...], said: str
) -> None:
    rejects(re.escape(said), load_recipe, recipe(tmp_path, *asked))


def point(macs: int, error: float) -> SweepPoint:
    shares = {"mlp_sparsity": 0.0, "attention_sparsity": 0.0, "conv_sparsity": 0.0}
    shares |= {"macs_share": macs / 100, "relative_error": error}
    counts = {"macs": macs, "parameters": macs, "sites_reduced": 1, "sites_refused": 0}
    none = {"budget": None, "agreement": None, "accuracy": None}
    return SweepPoint(preset="best", geometry="padded", **shares, **counts, **none)  # type: ignore[arg-type]


def test_sweep_is_summarised_in_a_sentence() -> None:
    points = [point(50, 0.3), point(91, 0.04), point(78, 0.09), point(95, 0.012), point(80, 0.11)]
    assert "0.95 at 2%, 0.91 at 5%, 0.78 at 10%;" in describe_sweep(points)
    assert {error: trial.macs for error, trial in smallest_by_error(points).items()} == {0.02: 95, 0.05: 91, 0.1: 78}
    only = describe_sweep([point(50, 0.3), point(60, 0.25)])
    assert only == "no trial has an error of 20% or less; the smallest is 25.0% at 0.60 of the MACs"
