"""Snapshots of a calibration, compared with calibrations on the first images, and how many images are enough."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from calib import memory
from calib.calibrate import Snapshots
from calib.combination import merge_moments
from calib.groups import group_ids, second_half_mask
from calib.images import Images
from calib.inputs import split_by_mask
from calib.moments import Moments
from calib.patch_moments import PatchMoments
from calib.store import load_moments, save_moments
from corp_deploy.planning.calibration_size import (
    CalibrationSize,
    SizeFit,
    compare_errors,
    find_sufficient,
    fit_losses,
    measure_calibration_size,
)
from corp_deploy.planning.judging import ScoredInputs, score_inputs
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import save
from corp_deploy.store.input_sets import images_for_model
from perf.report.curves import ImagesPoint
from tests import small_convnets, tiny
from tests.command import invoked
from tests.doubles import some
from tests.refusals import rejects
from tests.sums import assert_equal

COUNT, BATCH = 30, 12


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    save(tiny.checkpoint(), root / "dense")
    pixels = tiny.images(COUNT)
    np.save(root / "images.npy", pixels)
    for count in (5, 12):
        np.save(root / f"first{count}.npy", pixels[:count])
    return root


def said(result: Result) -> str:
    return " ".join(result.stderr.split())


def run_calibrate(home: Path, images: str, output: Path, *words: object, code: int = 0) -> Result:
    given = ["--model", home / "dense", "--images", home / images, "--batch-size", BATCH, "-o", output]
    return invoked("calibrate", *given, *words, code=code)


@pytest.mark.parametrize("words", [(), ("--attention-system",)])
def test_snapshot_equals_a_calibration_on_the_first_images(home: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    result = run_calibrate(home, "images.npy", tmp_path / "m.safetensors", *words, "--snapshots", "5,12,30", "--json")
    record = json.loads(result.stdout)
    assert [each["images"] for each in record["snapshots"]] == [5, 12, 30]
    for count in (5, 12):
        run_calibrate(home, f"first{count}.npy", tmp_path / "alone.safetensors", *words)
        snapshot, alone = (load_moments(tmp_path / f"{name}.safetensors") for name in (f"m.{count}", "alone"))
        assert_equal(snapshot, alone)
        assert snapshot.lineage == alone.lineage
    run_calibrate(home, "images.npy", tmp_path / "without.safetensors", *words)
    whole = (tmp_path / "without.safetensors").read_bytes()
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "m.30.safetensors").read_bytes() == whole


def test_snapshots_exclude_held_out_images(home: Path, tmp_path: Path) -> None:
    run_calibrate(home, "images.npy", tmp_path / "m.safetensors", "--hold-out", 6, "--snapshots", "10,24")
    snapshot, held_out = load_moments(tmp_path / "m.10.safetensors"), load_moments(tmp_path / "m.held-out.safetensors")
    assert not torch.isin(snapshot.image_ids, held_out.image_ids).any()
    source = images_for_model(tiny.checkpoint().model, home / "images.npy")
    fitted = [place for place in range(COUNT) if int(source.ids[place]) not in held_out.image_ids.tolist()]
    alone = calibrate(tiny.checkpoint(), source.subset(fitted[:10]), batch_size=BATCH)
    assert_equal(snapshot, alone)
    beyond = ("--hold-out", 6, "--snapshots", "10,25")
    message = run_calibrate(home, "images.npy", tmp_path / "n.safetensors", *beyond, code=2).stderr
    assert "--snapshots 25: expected at most 24" in message


def test_sampled_images_are_taken_in_random_order(home: Path, tmp_path: Path) -> None:
    drawn = ("--samples", 20, "--seed", 3)
    run_calibrate(home, "images.npy", tmp_path / "m.safetensors", *drawn, "--snapshots", "7")
    generator = np.random.default_rng
    places = np.sort(generator(3).choice(COUNT, 20, replace=False))[generator(3).permutation(20)]
    source = images_for_model(tiny.checkpoint().model, home / "images.npy")
    first = source.subset(places[:7].tolist())
    assert_equal(load_moments(tmp_path / "m.7.safetensors"), calibrate(tiny.checkpoint(), first, batch_size=BATCH))
    run_calibrate(home, "images.npy", tmp_path / "sorted.safetensors", *drawn)
    assert_equal(load_moments(tmp_path / "m.safetensors"), load_moments(tmp_path / "sorted.safetensors"), limit=1e-6)


def test_grouped_snapshots_contain_both_halves(home: Path, tmp_path: Path) -> None:
    labels = tmp_path / "groups.json"
    labels.write_text(json.dumps([f"photograph {place % 10}" for place in range(COUNT)]))
    words = ("--groups", labels, "--snapshots", "5,21")
    run_calibrate(home, "images.npy", tmp_path / "m.safetensors", *words)
    source = images_for_model(tiny.checkpoint().model, home / "images.npy")
    groups_B = group_ids(source, str(labels))
    second_B = second_half_mask(groups_B, seed=0)
    for count in (5, 21):
        snapshot, first = load_moments(tmp_path / f"m.{count}.safetensors"), source.subset(range(count))
        halves = split_by_mask(first, second_B[:count])  # each half's products are summed and rounded separately
        alone, second = (calibrate(tiny.checkpoint(), half, batch_size=BATCH) for half in halves)
        assert_equal(snapshot, merge_moments(alone, second))
        assert_equal(some(snapshot.half), second)
        group_of = dict(zip(source.ids.tolist(), groups_B.tolist(), strict=True))
        assert snapshot.group_ids.tolist() == [group_of[each] for each in snapshot.image_ids.tolist()]
    assert not list(tmp_path.glob("*.partial.*"))


def test_snapshot_within_one_half_is_refused(home: Path, tmp_path: Path) -> None:
    words = ("--groups", "image", "--snapshots", "1")
    message = said(run_calibrate(home, "images.npy", tmp_path / "m.safetensors", *words, code=2))
    assert "the first 1 images are all in one half of the groups" in message
    assert not list(tmp_path.iterdir())


def test_snapshots_work_for_convolutions(tmp_path: Path) -> None:
    convnet = small_convnets.checkpoint("resnet18")
    source = small_convnets.opened(convnet.model, 12, tmp_path)

    def write(count: int, moments: Moments) -> None:
        save_moments(moments, tmp_path / f"{count}.safetensors")

    calibrate(convnet, source, batch_size=8, snapshots=Snapshots(counts=(3, 8), write=write))
    for count in (3, 8):
        snapshot = load_moments(tmp_path / f"{count}.safetensors")
        assert_equal(snapshot, calibrate(convnet, source.subset(range(count)), batch_size=8))
        assert any(isinstance(site, PatchMoments) for site in snapshot.sites.values())


@pytest.mark.slow("models")
def test_resumed_run_writes_equal_snapshots(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = tmp_path / "groups.json"
    labels.write_text(json.dumps([place % 10 for place in range(COUNT)]))
    for name, grouped in (("plain", ()), ("grouped", ("--groups", labels))):
        (tmp_path / name).mkdir()
        words = (*grouped, "--snapshots", "5,21", "--checkpoint-every", 6, "--batch-size", 4)
        run_calibrate(home, "images.npy", tmp_path / name / "m.safetensors", *words)
        for stop in (8, 16, 24):
            output = tmp_path / name / str(stop) / "m.safetensors"
            output.parent.mkdir()
            interrupt_after(stop, monkeypatch)
            run_calibrate(home, "images.npy", output, *words, code=130)
            monkeypatch.undo()
            assert not output.exists()
            run_calibrate(home, "images.npy", output, *words)
            for file in ("m", "m.5", "m.21"):
                there, uninterrupted = (at / f"{file}.safetensors" for at in (output.parent, tmp_path / name))
                assert there.read_bytes() == uninterrupted.read_bytes(), (name, stop, file)
            assert not list(output.parent.glob("*.partial.*"))


def interrupt_after(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt reading after so many images, counted over all passes."""
    read, seen = Images.read, 0

    def stopping(self: Images, *words: Any, **named: Any) -> Iterator[Any]:
        nonlocal seen
        for batch in read(self, *words, **named):
            if seen >= images:
                raise KeyboardInterrupt
            seen += len(batch.ids)
            yield batch

    monkeypatch.setattr(Images, "read", stopping)


def test_lost_or_different_snapshots_end_a_resumed_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "m.safetensors"
    words = ("--checkpoint-every", 6, "--batch-size", 4, "--groups", "none", "--snapshots")
    interrupt_after(20, monkeypatch)
    run_calibrate(home, "images.npy", output, *words, "5,21", code=130)
    monkeypatch.undo()
    assert "snapshots was '5,21', now '5'" in said(run_calibrate(home, "images.npy", output, *words, "5", code=2))
    (tmp_path / "m.5.safetensors").unlink()
    assert "first 5: its file is missing" in said(run_calibrate(home, "images.npy", output, *words, "5,21", code=2))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ("0", "expected a whole number from 1"),
        ("5,5", "a value is given twice"),
        ("21,5", "snapshots: got 21, 5, expected ascending counts from 1"),
        ("5,31", "--snapshots 31: expected at most 30"),
        ("5,x", "'x'"),
    ],
)
def test_invalid_numbers_are_refused_before_the_pass(home: Path, tmp_path: Path, counts: str, message: str) -> None:
    result = run_calibrate(home, "images.npy", tmp_path / "m.safetensors", "--snapshots", counts, code=2)
    assert message in said(result)
    assert not list(tmp_path.iterdir())


def test_memory_of_a_snapshot_within_a_batch_is_counted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics = Statistics(patterns=("blocks.0.mlp.*",))
    width = 192
    one = 8 * (width**2 + 2 * width)
    monkeypatch.setattr(memory, "bytes_available", lambda device: int(1.5 * one))
    monkeypatch.setattr("calib.calibrate.bytes_available", lambda device: int(1.5 * one))
    source = images_for_model(tiny.checkpoint().model, home / "images.npy")

    def snapshot_at(count: int) -> None:
        snapshots = Snapshots(counts=(count,), write=lambda _, moments: None)
        calibrate(tiny.checkpoint(), source, batch_size=BATCH, statistics=statistics, snapshots=snapshots)

    for end_of_a_batch in (12, 30):
        snapshot_at(end_of_a_batch)
    rejects("1 sites need", snapshot_at, 13)


# How many calibration images are enough: planted curves, and a measured one, compared with single reductions

SIZES = (4, 12, 40)
METHOD = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)


@pytest.fixture(scope="module")
def moments_and_inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Moments], Moments, ScoredInputs]:
    root, dense = tmp_path_factory.mktemp("size"), tiny.checkpoint()
    source = tiny.opened(root / "fit.npy", tiny.images(SIZES[-1], seed=1))
    others = tiny.opened(root / "others.npy", tiny.images(24, seed=2))
    every = [calibrate(dense, source.subset(range(size)), batch_size=8) for size in SIZES]
    return every, calibrate(dense, others, batch_size=8), score_inputs(dense.model, others, None, 8)


@pytest.fixture(scope="module")
def size(moments_and_inputs: tuple[list[Moments], Moments, ScoredInputs]) -> CalibrationSize:
    every, held_out, scored = moments_and_inputs
    return measure_calibration_size(tiny.checkpoint().model, every, METHOD, held_out=held_out, scored=scored)


def test_each_point_equals_its_reduction(
    moments_and_inputs: tuple[list[Moments], Moments, ScoredInputs], size: CalibrationSize
) -> None:
    every, held_out, scored = moments_and_inputs
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
    assert size.points[0].over_largest > 1.05, "four images overfit"
    assert ("are not shown to be enough" in size.sentence) == (size.sufficient is None)


def test_error_curve_is_linear_in_one_over_n() -> None:
    images = [100, 200, 500, 1000]
    fit = fit_losses(images, [0.2 + 30.0 / n for n in images])
    assert (fit.limit, fit.slope) == pytest.approx((0.2, 30.0))
    assert fit.residual < 1e-12
    assert fit.images_within(0.05) == 3000  # 30 / N = 0.05 * 0.2
    bent = fit_losses(images, [0.3, 0.2, 0.3, 0.2])
    system = np.array([[1.0, 1.0 / n] for n in images])
    limit, slope = np.linalg.lstsq(system, np.array([0.3, 0.2, 0.3, 0.2]), rcond=None)[0]
    assert (bent.limit, bent.slope) == pytest.approx((limit, slope))
    assert bent.residual > 0.1
    assert SizeFit(limit=0.2, slope=-1.0, residual=0.0).images_within(0.05) is None


def test_bootstrap_resamples_inputs_in_pairs() -> None:
    """If errors differ by a factor alone, their ratio has no uncertainty, however much they vary over inputs."""
    errors = np.random.default_rng(0).exponential(size=50)
    assert compare_errors(1.1 * errors, errors) == pytest.approx((1.1, 1.1, 1.1))
    noisy = errors + np.random.default_rng(1).normal(scale=0.3, size=50)
    ratio, low, high = compare_errors(noisy, errors)
    assert low < ratio < high
    assert compare_errors(np.zeros(3), np.zeros(3)) == (1.0, 1.0, 1.0)
    assert compare_errors(np.ones(3), np.zeros(3))[2] == float("inf")


def point_at(images: int, high: float) -> ImagesPoint:
    ratio = min(high, 1.0)
    rest = {"fitted": 0.1, "held_out": 0.2 * high, "relative_error": 0.1, "agreement": None}
    return ImagesPoint(images=images, over_largest=ratio, low=ratio, high=high, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("highs", "sufficient"),
    [((1.5, 1.2, 1.04, 1.0), 400), ((1.04, 1.2, 1.04, 1.0), 400), ((1.0, 1.0, 1.0, 1.0), 100), ((2, 2, 1.1, 1), None)],
)
def test_recommended_number_needs_all_larger_ones_to_agree(highs: tuple[float, ...], sufficient: int | None) -> None:
    points = [point_at(images, high) for images, high in zip((100, 200, 400, 800), highs, strict=True)]
    assert find_sufficient(points, 0.05) == sufficient


def test_line_is_fitted_to_errors_of_inputs_without_held_out_moments(
    moments_and_inputs: tuple[list[Moments], Moments, ScoredInputs], size: CalibrationSize
) -> None:
    every, _, scored = moments_and_inputs
    assert (size.judged_by, size.fit_of) == ("relative_error", "held_out")
    by_inputs = measure_calibration_size(tiny.checkpoint().model, every[:2], METHOD, held_out=None, scored=scored)
    assert (by_inputs.judged_by, by_inputs.fit_of) == ("relative_error", "relative_error")
    assert by_inputs.points[0].held_out is None


def test_unjudgeable_requests_are_refused(moments_and_inputs: tuple[list[Moments], Moments, ScoredInputs]) -> None:
    every, held_out, scored = moments_and_inputs

    def measure(moments: list[Moments], held_out: Moments) -> CalibrationSize:
        return measure_calibration_size(tiny.checkpoint().model, moments, METHOD, held_out=held_out, scored=scored)

    rejects("moments of 40, 12, 4 images: expected two files or more with ascending", measure, every[::-1], held_out)
    rejects("calibration images too", measure, every, every[0])
