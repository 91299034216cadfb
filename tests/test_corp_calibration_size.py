"""How many calibration images are enough: planted curves, and a real one against reductions judged in loops."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calib.moments import Moments
from corp_deploy.planning.calibration_size import (
    CalibrationSize,
    SizeFit,
    calibration_size,
    fit_of_losses,
    ratio_to,
    smallest_sufficient,
)
from corp_deploy.planning.sweep_scores import Scored, scored_inputs
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from ground.errors import BadInput
from perf.report.images_plot import ImagesPoint, images_plot, images_table
from tests import tiny

SIZES = (4, 12, 40)
METHOD = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Moments], Moments, Scored]:
    root, dense = tmp_path_factory.mktemp("size"), tiny.checkpoint()
    source = tiny.opened(root / "fit.npy", tiny.images(SIZES[-1], seed=1))
    others = tiny.opened(root / "others.npy", tiny.images(24, seed=2))
    every = [calibrate(dense, source.subset(range(size)), batch_size=8) for size in SIZES]
    return every, calibrate(dense, others, batch_size=8), scored_inputs(dense.model, others, None, 8)


@pytest.fixture(scope="module")
def size(judged: tuple[list[Moments], Moments, Scored]) -> CalibrationSize:
    every, held_out, scored = judged
    return calibration_size(tiny.checkpoint().model, every, METHOD, held_out=held_out, scored=scored)


def test_each_point_is_that_reduction(judged: tuple[list[Moments], Moments, Scored], size: CalibrationSize) -> None:
    every, held_out, scored = judged
    assert isinstance(scored.inputs, torch.Tensor)
    dense = tiny.checkpoint().model
    means = []
    for point, moments in zip(size.points, every, strict=True):
        found = reduce(dense, moments, METHOD, held_out=held_out)
        fitted = others = 0.0
        for site in found.sites:
            assert site.held_out is not None
            fitted += site.error / site.energy
            others += site.held_out.error / site.held_out.energy
        assert (point.fitted, point.held_out) == pytest.approx((fitted, others), rel=1e-9)
        with torch.inference_mode():
            right, got = dense(scored.inputs).double(), found.model(scored.inputs).double()
        ratios = [float((b - a).norm() / a.norm()) for a, b in zip(right, got, strict=True)]
        same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(right, got, strict=True)]
        assert point.relative_error == pytest.approx(np.mean(ratios), rel=1e-3)
        assert point.agreement == pytest.approx(np.mean(same))
        means.append(np.mean(ratios))
    assert [point.over_largest for point in size.points] == pytest.approx([m / means[-1] for m in means], rel=1e-3)
    assert size.points[0].over_largest > 1.05  # four images over-fit


def test_the_curve_is_a_line_over_one_by_n() -> None:
    images = [100, 200, 500, 1000]
    fit = fit_of_losses(images, [0.2 + 30.0 / n for n in images])
    assert (fit.limit, fit.slope) == pytest.approx((0.2, 30.0))
    assert fit.residual < 1e-12
    assert fit.images_within(0.05) == 3000  # 30 / N = 0.05 * 0.2
    bent = fit_of_losses(images, [0.3, 0.2, 0.3, 0.2])
    system = np.array([[1.0, 1.0 / n] for n in images])
    limit, slope = np.linalg.lstsq(system, np.array([0.3, 0.2, 0.3, 0.2]), rcond=None)[0]
    assert (bent.limit, bent.slope) == pytest.approx((limit, slope))
    assert bent.residual > 0.1
    assert SizeFit(limit=0.2, slope=-1.0, residual=0.0).images_within(0.05) is None


def test_inputs_are_drawn_in_pairs() -> None:
    """Errors that differ by a factor alone have no uncertainty, however much they vary over inputs."""
    errors = np.random.default_rng(0).exponential(size=50)
    assert ratio_to(1.1 * errors, errors) == pytest.approx((1.1, 1.1, 1.1))
    noisy = errors + np.random.default_rng(1).normal(scale=0.3, size=50)
    ratio, low, high = ratio_to(noisy, errors)
    assert low < ratio < high
    assert ratio_to(np.zeros(3), np.zeros(3)) == (1.0, 1.0, 1.0)
    assert ratio_to(np.ones(3), np.zeros(3))[2] == float("inf")


def at(images: int, high: float) -> ImagesPoint:
    ratio = min(high, 1.0)
    rest = {"fitted": 0.1, "held_out": 0.2 * high, "relative_error": 0.1, "agreement": None}
    return ImagesPoint(images=images, over_largest=ratio, low=ratio, high=high, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("highs", "sufficient"),
    [((1.5, 1.2, 1.04, 1.0), 400), ((1.04, 1.2, 1.04, 1.0), 400), ((1.0, 1.0, 1.0, 1.0), 100), ((2, 2, 1.1, 1), None)],
)
def test_all_larger_numbers_must_do_as_well(highs: tuple[float, ...], sufficient: int | None) -> None:
    points = [at(images, high) for images, high in zip((100, 200, 400, 800), highs, strict=True)]
    assert smallest_sufficient(points, 0.05) == sufficient


def test_held_out_moments_judge_alone_and_so_do_inputs(judged: tuple[list[Moments], Moments, Scored]) -> None:
    every, held_out, scored = judged
    dense = tiny.checkpoint().model
    by_moments = calibration_size(dense, every, METHOD, held_out=held_out)
    assert (by_moments.judged_by, by_moments.fit_of) == ("held_out", "held_out")
    losses = [point.held_out for point in by_moments.points if point.held_out is not None]
    assert [point.high for point in by_moments.points] == pytest.approx([loss / losses[-1] for loss in losses])
    by_inputs = calibration_size(dense, every[:2], METHOD, scored=scored)
    assert (by_inputs.judged_by, by_inputs.fit_of) == ("relative_error", "relative_error")
    assert by_inputs.points[0].held_out is None


def test_what_cannot_be_judged_is_refused(judged: tuple[list[Moments], Moments, Scored]) -> None:
    every, held_out, _ = judged
    dense = tiny.checkpoint().model
    with pytest.raises(BadInput, match="moments of 40, 12, 4 images: expected two files or more with ascending"):
        calibration_size(dense, every[::-1], METHOD, held_out=held_out)
    with pytest.raises(BadInput, match="no inputs to judge on"):
        calibration_size(dense, every, METHOD)
    with pytest.raises(BadInput, match="calibration images too"):
        calibration_size(dense, every, METHOD, held_out=every[0])


def test_the_report_shows_every_point_and_the_answer(size: CalibrationSize, tmp_path: Path) -> None:
    record = size.as_json()
    assert (record["kind"], record["version"]) == ("corp-deploy/calibration-size", 1)
    points = [ImagesPoint(**point) for point in record["points"]]
    drawn = images_plot(points).standalone
    for point in points:
        assert f"others, {point.images}: {point.held_out:.4g} loss" in drawn
    table = images_table(points, sentence=size.sentence)
    assert [row[0] for row in table.rows] == ["4", "12", "40"]
    assert table.note == size.sentence
    assert ("are not shown to be enough" in size.sentence) == (size.sufficient is None)
