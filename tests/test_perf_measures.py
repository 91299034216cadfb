"""Error measures against sums written out by hand, and tolerances against the rules they state."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.precision import FLOAT16
from perf.parity.labels import accuracy, mcnemar
from perf.parity.logits import LogitMeasures, margins, per_image
from perf.parity.measures import measures
from perf.parity.tolerance import CEILINGS, exact, half, limits
from perf.stats.shares import wilson

Floats = NDArray[np.float64]


def logits(images: int = 12, classes: int = 7, seed: int = 0) -> Floats:
    return np.asarray(np.random.default_rng(seed).standard_normal((images, classes)) * 3)


def test_measures_match_explicit_loops() -> None:
    ref = logits()
    cand = ref + 0.3 * logits(seed=1)
    squared, size, biggest, kl, cosine, overlap, agree = 0.0, 0.0, 0.0, [], [], [], 0
    for r, c in zip(ref, cand, strict=True):
        squared += sum((a - b) ** 2 for a, b in zip(c, r, strict=True))
        size += sum(a * a for a in r)
        biggest = max(biggest, *(abs(a - b) for a, b in zip(c, r, strict=True)))
        p, q = ([math.exp(v) / sum(math.exp(w) for w in row) for v in row] for row in (r, c))
        kl.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        cosine.append(float(r @ c) / math.sqrt(float(r @ r) * float(c @ c)))
        top_r, top_c = (sorted(range(7), key=lambda i, row=row: -row[i])[:5] for row in (r, c))  # type: ignore[misc]
        overlap.append(len(set(top_r) & set(top_c)) / 5)
        agree += top_r[0] == top_c[0]
    found = measures(ref, cand)
    assert found.relative_error == pytest.approx(math.sqrt(squared / size), rel=1e-12)
    assert found.max_abs == pytest.approx(biggest)
    assert found.kl_mean == pytest.approx(np.mean(kl))
    assert found.kl_max == pytest.approx(max(kl))
    assert found.cosine_mean == pytest.approx(np.mean(cosine))
    assert found.cosine_min == pytest.approx(min(cosine))
    assert found.top5_overlap == pytest.approx(np.mean(overlap))
    assert (found.top1_agreement, found.flips) == (agree / 12, 12 - agree)
    assert 0 < found.flips < 12


def test_equal_logits_have_no_error_in_any_dtype() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        found = measures(logits().astype(dtype), logits().astype(dtype))
        assert (found.relative_error, found.max_abs, found.kl_max, found.flips) == (0, 0, 0, 0)
        assert (found.top5_overlap, found.spread_ratio) == (1, 1)
        assert found.cosine_min == pytest.approx(1)


def test_a_decisive_flip_is_one_beyond_the_noise() -> None:
    ref = np.array([[1.0, 0.99, 0.0], [5.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    cand = np.array([[0.99, 1.0, 0.0], [1.0, 5.0, 0.0], [3.0, 0.0, 0.0]])
    found = measures(ref, cand, margin_noise=0.1)
    assert (found.flips, found.decisive_images, found.decisive_flips) == (2, 2, 1)
    np.testing.assert_allclose(margins(ref), [0.01, 4.0, 3.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_logit_spoils_its_image_and_the_total_only(bad: float) -> None:
    cand = logits()
    cand[3, 2] = bad
    found, each = measures(logits(), cand), per_image(logits(), cand)
    assert (found.nonfinite_images, found.flips) == (1, 1)
    assert found.relative_error == math.inf
    assert found.kl_max == math.inf
    assert found.cosine_min == 0
    assert each.finite_N.tolist() == [place != 3 for place in range(12)]
    assert np.isfinite(each.relative_error_N).sum() == 11


def test_constant_outputs_have_no_spread() -> None:
    cand = np.broadcast_to(logits()[0], (12, 7))
    assert measures(logits(), cand).spread_ratio == pytest.approx(0, abs=1e-12)


def test_a_reference_of_zeros_and_a_single_class_are_no_crash() -> None:
    assert measures(np.zeros((2, 3)), np.zeros((2, 3))).relative_error == 0
    assert measures(np.zeros((2, 3)), np.ones((2, 3))).relative_error == math.inf
    assert measures(np.ones((4, 1)), 2 * np.ones((4, 1))).flips == 0


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), r"got reference \(2, 3\) and candidate \(2, 4\)"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "same"),
        (np.zeros(3), np.zeros(3), "images, classes"),
        (np.zeros((2, 5, 3)), np.zeros((2, 5, 3)), "give models whose output is pooled"),
        (np.full((2, 3), np.nan), np.zeros((2, 3)), "reference gives NaN or Inf on 2 of 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(reference: Floats, candidate: Floats, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        measures(reference, candidate)


def test_wilson_against_its_quadratic() -> None:
    """Its bounds are the shares p with (p - hits/n)^2 = z^2 p (1 - p) / n."""
    for hits, images in ((3, 10), (990, 1000), (1, 1)):
        for p in wilson(hits, images):
            assert (p - hits / images) ** 2 == pytest.approx(1.959963984540054**2 * p * (1 - p) / images, abs=1e-12)
    low, high = wilson(0, 20)
    assert low == 0
    assert 0.1 < high < 0.2


def test_accuracy_counts_spoilt_images_as_wrong() -> None:
    scores = np.eye(4)
    scores[0] = np.nan
    found = accuracy("m", scores, np.array([0, 1, 2, 0]))
    assert (found.correct, found.images, found.accuracy) == (2, 4, 0.5)


def test_mcnemar_against_the_binomial_by_hand() -> None:
    labels = np.zeros(10, dtype=np.int64)
    a, b = np.tile([1.0, 0.0], (10, 1)), np.tile([1.0, 0.0], (10, 1))
    b[:5] = [0.0, 1.0]
    a[9] = [0.0, 1.0]
    found = mcnemar("a", a, "b", b, labels)
    assert (found.only_a, found.only_b) == (5, 1)
    assert found.p_value == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar("a", a, "a", a, labels).p_value == 1


def test_mcnemar_holds_on_many_images() -> None:
    labels = np.zeros(6000, dtype=np.int64)
    wrong = np.tile([0.0, 1.0], (6000, 1))
    a, b = wrong.copy(), wrong.copy()
    a[:3000], b[3000:] = [1.0, 0.0], [1.0, 0.0]
    assert mcnemar("a", a, "b", b, labels).p_value == 1
    assert mcnemar("a", a, "wrong", wrong, labels).p_value < 1e-300


@pytest.mark.parametrize(
    ("labels", "words"), [(np.zeros(3, dtype=np.int64), "one label per image"), (np.full(4, 4), "expected 0 to 3")]
)
def test_labels_that_do_not_fit_are_refused(labels: NDArray[np.int64], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        accuracy("m", np.eye(4), labels)


def noise(error: float, max_abs: float = 0.1) -> LogitMeasures:
    ref = np.array([[10.0, 0.0], [0.0, 10.0]])
    found = measures(ref, ref * (1 + error))
    assert found.relative_error == pytest.approx(error)
    return found


def test_the_exact_bound_grows_with_the_products_in_a_row() -> None:
    found = exact(products=74, largest_logit=10)
    assert found.max_relative_error == 10 * 2**-24 * 74
    assert found.margin_noise == pytest.approx(20 * 10 * 2**-24 * 74)
    assert found.rule == "float32: 10 x 2^-24 x 74 products in a row"


def test_the_half_bound_is_calibrated_floored_and_capped() -> None:
    assert half(noise(0.002), factor=4).max_relative_error == pytest.approx(0.008)
    assert half(noise(0.002), factor=4).margin_noise == pytest.approx(2 * 4 * 0.02)
    assert half(noise(0.00001)).max_relative_error == 2**-11
    broken = half(noise(0.5))
    assert broken.max_relative_error == CEILINGS[FLOAT16]
    assert broken.margin_noise == 0
    assert "no yardstick" in broken.rule
    ref = np.eye(2)
    assert half(measures(ref, np.full((2, 2), np.nan))).max_relative_error == CEILINGS[FLOAT16]
    assert half(measures(ref, ref)).max_relative_error == 2**-11


def test_limits_are_the_users_and_checked() -> None:
    assert not limits().bounds
    assert limits(min_agreement=0.99, noise=noise(0.002)).margin_noise == pytest.approx(0.04)
    with pytest.raises(BadInput, match="got 1\\.5, expected"):
        limits(min_agreement=1.5)
    with pytest.raises(BadInput, match="got -1"):
        limits(max_error=-1)
    with pytest.raises(BadInput, match="expected 1 or more"):
        half(noise(0.1), factor=0.5)
