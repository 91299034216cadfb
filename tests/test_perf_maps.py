"""Measures of score maps against loops over pixels in float64, and score maps in parity records."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.files import write_json
from ground.ports import OutputPort
from perf.parity import tolerance
from perf.parity.link import Link
from perf.parity.maps import MapMeasures, SeparateHead
from perf.parity.measures import figures_by_input, measure_outputs, measure_relative_errors
from perf.parity.parity import ImageSet, Parity, load_parity
from perf.report.content import Content
from perf.report.tables import build_tables
from tests.doubles import some
from tests.links import link_between
from tests.refusals import rejects

RNG = np.random.default_rng(0)
MAP = OutputPort(name="saliency", role="score map")
Maps = NDArray[np.float32]


def pair(*shape: int) -> tuple[Maps, Maps]:
    reference = RNG.random(shape, dtype=np.float32)
    return reference, (reference + 0.2 * RNG.standard_normal(shape)).astype(np.float32)


def measured(reference: Maps, candidate: Maps, threshold: float = 0.5) -> MapMeasures:
    errors = measure_outputs(reference, candidate, role="score map", threshold=threshold)
    assert isinstance(errors, MapMeasures)
    return errors


def overlap(ours: list[object], theirs: list[object], classes: list[object]) -> float:
    """Return the intersection over union of two lists of answers, averaged over the classes that occur."""
    shares = []
    for each in classes:
        union = sum(each in both for both in zip(ours, theirs, strict=True))
        if union:
            shares.append(sum(both == (each, each) for both in zip(ours, theirs, strict=True)) / union)
    return sum(shares) / len(shares) if shares else 1.0


def answers(one: Maps, threshold: float) -> list[object]:
    """Return for each pixel whether its score is above the threshold, or its likeliest class."""
    if one.ndim == 2:
        return [bool(one[y, x] > threshold) for y in range(one.shape[0]) for x in range(one.shape[1])]
    return [
        max(range(len(one)), key=lambda k: float(one[k, y, x]))
        for y in range(one.shape[1])
        for x in range(one.shape[2])
    ]


@pytest.mark.parametrize(("shape", "threshold"), [((4, 5, 6), 0.5), ((4, 5, 6), 0.9), ((3, 4, 5, 6), 0.5)])
def test_maps_are_compared_pixel_by_pixel(shape: tuple[int, ...], threshold: float) -> None:
    reference, candidate = pair(*shape)
    classes: list[object] = [True] if len(shape) == 3 else list(range(shape[1]))
    errors = measured(reference, candidate, threshold)
    ours = [answers(each, threshold) for each in reference]
    theirs = [answers(each, threshold) for each in candidate]
    each = [overlap(a, b, classes) for a, b in zip(ours, theirs, strict=True)]
    agree = [np.mean([x == y for x, y in zip(a, b, strict=True)]) for a, b in zip(ours, theirs, strict=True)]
    flat = [x for a in ours for x in a], [x for b in theirs for x in b]
    off = [
        float(np.linalg.norm(b.astype(float) - a.astype(float)) / np.linalg.norm(a.astype(float)))
        for a, b in zip(reference, candidate, strict=True)
    ]
    assert 0.2 < errors.iou < 0.95
    assert errors.iou == pytest.approx(overlap(*flat, classes), rel=1e-12)
    assert errors.iou_worst == pytest.approx(min(each), rel=1e-12)
    assert errors.pixel_agreement == pytest.approx(np.mean(agree), rel=1e-12)
    assert errors.relative_error_mean == pytest.approx(np.mean(off), rel=1e-6)
    assert errors.relative_error_worst == pytest.approx(max(off), rel=1e-6)
    whole = np.linalg.norm(candidate.astype(float) - reference) / np.linalg.norm(reference.astype(float))
    assert errors.relative_error == pytest.approx(whole, rel=1e-6)
    assert (errors.pixels, errors.threshold) == (shape[0] * 30, threshold if len(shape) == 3 else None)
    by_input = figures_by_input(reference, {"c": candidate}, role="score map", threshold=threshold)
    np.testing.assert_allclose(by_input["c.iou"].astype(float), each)
    np.testing.assert_allclose(by_input["c.pixel_agreement"].astype(float), agree)
    np.testing.assert_allclose(measure_relative_errors(reference, candidate, role="score map"), off, rtol=1e-6)


def test_single_class_map_is_a_map_of_scores() -> None:
    reference, candidate = pair(4, 5, 6)
    alone = measured(reference[:, None], candidate[:, None])
    assert asdict(alone) == asdict(measured(reference, candidate))


def test_empty_masks_overlap_fully_and_nan_never() -> None:
    reference, candidate = pair(3, 4, 4)
    assert measured(reference * 0.1, candidate * 0.1, threshold=5.0).iou == 1.0
    candidate[1, 0, 0] = np.nan
    errors = measured(reference, candidate)
    assert (errors.nonfinite_images, errors.iou_worst, errors.relative_error) == (1, 0.0, np.inf)
    assert errors.pixel_agreement < 2 / 3
    assert measured(reference, reference).iou == 1.0
    assert measured(reference, np.broadcast_to(reference[:1], reference.shape)).spread_ratio < 1e-12


@pytest.mark.parametrize(("one", "other"), [((4, 5), (4, 5)), ((4, 5, 6), (4, 5, 7)), ((2, 3, 4, 5, 6),) * 2])
def test_outputs_that_are_not_maps_are_refused(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match=r"^score map: got .*expected (the same )?\[inputs, height, width\] or \[inputs"):
        measured(RNG.random(one, dtype=np.float32), RNG.random(other, dtype=np.float32))
    with pytest.raises(BadInput, match="the reference gives NaN or Inf on 1 of 2 inputs"):
        measured(np.full((2, 3, 3), [[[np.nan]], [[1.0]]], dtype=np.float32), np.ones((2, 3, 3), dtype=np.float32))


def linked(reference: Maps, candidate: Maps, **limits: Any) -> Link:
    bound, by_batch = tolerance.user_tolerance(**limits), {2: candidate[:2], 8: candidate}
    return link_between(reference, by_batch, tolerance=bound, port=MAP, several=True)


def test_map_link_is_judged_by_error_overlap_and_pixels() -> None:
    reference, candidate = pair(8, 6, 6)
    errors = measured(reference, candidate)
    limits = {
        "max_error": errors.relative_error,
        "min_iou": errors.iou,
        "min_agreement": errors.pixel_agreement,
        "confidence": 0.0,
    }
    free = linked(reference, candidate)
    assert free.status == "UNJUDGED"
    assert f"IoU {errors.iou:.4f}, pixel agreement {errors.pixel_agreement:.2%}".replace("%", " %") in free.reason
    assert linked(reference, candidate, **limits).status == "PASS"
    for name, reason in (("max_error", "relative error"), ("min_iou", "an IoU of"), ("min_agreement", "pixels have")):
        tight = limits[name] + (-1e-6 if name == "max_error" else 1e-6)
        found = linked(reference, candidate, **{**limits, name: tight})
        assert (found.status, reason in found.reason) == ("FAIL", True), found.reason
    rejects(r"min IoU: got 1.5, expected a share in \[0, 1\]", tolerance.user_tolerance, min_iou=1.5)


def test_map_record_round_trips_and_is_shown(tmp_path: Path) -> None:
    reference, candidate = pair(8, 6, 6)
    head = SeparateHead(file="saliency.onnx", sha256="0" * 64, reads=("patches",), maps=("saliency",))
    parity = Parity(
        images=ImageSet(count=8, digest="x"), links=(linked(reference, candidate, min_iou=0.1),), heads=(head,)
    )
    record = parity.to_json()
    assert record["links"][0]["tolerance"]["min_iou"] == 0.1
    write_json(tmp_path / "parity.json", record)
    assert load_parity(tmp_path / "parity.json") == parity
    assert "heads" not in replace(parity, heads=()).to_json()
    shown = build_tables(Content(title="t", parity=parity))["maps"]
    errors = measured(reference, candidate)
    assert shown.rows[0][0] == "reduced saliency"
    assert shown.rows[0][5:7] == (f"{errors.iou:.4f}", f"{errors.iou_worst:.4f}")
    assert "saliency.onnx reads patches" in shown.note


def test_error_amplifying_head_widens_the_float32_bound() -> None:
    plain, wide = (tolerance.exact_tolerance(products=3, largest_logit=0.0, magnified=by) for by in (1.0, 2.5))
    assert wide.max_relative_error == pytest.approx(2.5 * some(plain.max_relative_error))
    assert "magnifies" in wide.rule
    assert "magnifies" not in plain.rule
