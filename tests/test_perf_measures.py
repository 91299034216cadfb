"""Error and similarity measures against explicit loops, and tolerances against the rules they state."""

import math
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from ground.precision import FLOAT16
from perf.parity.labels import accuracy_on_labels
from perf.parity.logits import LogitMeasures, margins, measure_logits
from perf.parity.measures import EmbeddingMeasures, FeatureMapMeasures, measure_outputs, measure_relative_errors
from perf.parity.rows import Floats
from perf.parity.similarity import MOST_DRAWN, draw_rows, linear_cka, same_neighbour
from perf.parity.tolerance import CEILINGS, exact_tolerance, half_tolerance, user_tolerance
from tests.doubles import some
from tests.refusals import rejects


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
    found = measure_logits(ref, cand)
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
        found = measure_logits(logits().astype(dtype), logits().astype(dtype))
        assert (found.relative_error, found.max_abs, found.kl_max, found.flips) == (0, 0, 0, 0)
        assert (found.top5_overlap, found.spread_ratio) == (1, 1)
        assert found.cosine_min == pytest.approx(1)


def test_decisive_flip_exceeds_the_noise() -> None:
    ref = np.array([[1.0, 0.99, 0.0], [5.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    cand = np.array([[0.99, 1.0, 0.0], [1.0, 5.0, 0.0], [3.0, 0.0, 0.0]])
    found = measure_logits(ref, cand, margin_noise=0.1)
    assert (found.flips, found.decisive_images, found.decisive_flips) == (2, 2, 1)
    np.testing.assert_allclose(margins(ref), [0.01, 4.0, 3.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_logit_affects_only_its_image_and_the_total(bad: float) -> None:
    cand = logits()
    cand[3, 2] = bad
    found, errors_N = measure_logits(logits(), cand), measure_relative_errors(logits(), cand)
    assert (found.nonfinite_images, found.flips, found.relative_error) == (1, 1, math.inf)
    assert (found.kl_max, found.cosine_min) == (math.inf, 0)
    assert np.isfinite(errors_N).tolist() == [place != 3 for place in range(12)]


def test_constant_logits_have_no_spread() -> None:
    cand = np.broadcast_to(logits()[0], (12, 7))
    assert measure_logits(logits(), cand).spread_ratio == pytest.approx(0, abs=1e-12)


def test_zero_reference_and_single_class_do_not_crash() -> None:
    assert measure_logits(np.zeros((2, 3)), np.zeros((2, 3))).relative_error == 0
    assert measure_logits(np.zeros((2, 3)), np.ones((2, 3))).relative_error == math.inf
    assert measure_logits(np.ones((4, 1)), 2 * np.ones((4, 1))).flips == 0


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), r"got reference \(2, 3\) and candidate \(2, 4\)"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "same"),
        (np.zeros(()), np.zeros(()), "images, classes"),
        (np.zeros((2, 5, 3)), np.zeros((2, 5, 3)), "give models whose output is pooled"),
        (np.full((2, 3), np.nan), np.zeros((2, 3)), "reference gives NaN or Inf on 2 of 2"),
    ],
)
def test_incomparable_outputs_are_refused(reference: Floats, candidate: Floats, words: str) -> None:
    rejects(words, measure_logits, reference, candidate)


def test_accuracy_counts_nonfinite_images_as_wrong() -> None:
    scores = np.eye(4)
    scores[0] = np.nan
    found = accuracy_on_labels("m", scores, np.array([0, 1, 2, 0]))
    assert (found.correct, found.images, found.accuracy) == (2, 4, 0.5)


@pytest.mark.parametrize(
    ("labels", "words"), [(np.zeros(3, dtype=np.int64), "one label per image"), (np.full(4, 4), "expected 0 to 3")]
)
def test_mismatched_labels_are_refused(labels: NDArray[np.int64], words: str) -> None:
    rejects(words, accuracy_on_labels, "m", np.eye(4), labels)


def noise(error: float, max_abs: float = 0.1) -> LogitMeasures:
    ref = np.array([[10.0, 0.0], [0.0, 10.0]])
    found = measure_logits(ref, ref * (1 + error))
    assert found.relative_error == pytest.approx(error)
    return found


def test_exact_bound_grows_with_the_depth_of_matrix_products() -> None:
    found = exact_tolerance(products=74, largest_logit=10)
    assert found.max_relative_error == 10 * 2**-24 * 74
    assert found.margin_noise == pytest.approx(20 * 10 * 2**-24 * 74)
    assert found.rule == "float32: 10 x 2^-24 x 74 products in a row"


def test_fp16_bound_is_calibrated_floored_and_capped() -> None:
    assert half_tolerance(noise(0.002), factor=4).max_relative_error == pytest.approx(0.008)
    assert half_tolerance(noise(0.002), factor=4).margin_noise == pytest.approx(2 * 4 * 0.02)
    assert half_tolerance(noise(0.00001)).max_relative_error == 2**-11
    broken = half_tolerance(noise(0.5))
    assert (broken.max_relative_error, broken.margin_noise) == (CEILINGS[FLOAT16], 0)
    assert "no yardstick" in broken.rule
    ref = np.eye(2)
    assert half_tolerance(measure_logits(ref, np.full((2, 2), np.nan))).max_relative_error == CEILINGS[FLOAT16]
    assert half_tolerance(measure_logits(ref, ref)).max_relative_error == 2**-11


def test_user_limits_are_applied_and_checked() -> None:
    assert not user_tolerance().bounds
    assert user_tolerance(min_agreement=0.99, noise=noise(0.002)).margin_noise == pytest.approx(0.04)
    rejects("got 1\\.5, expected", user_tolerance, min_agreement=1.5)
    rejects("got -1", user_tolerance, max_error=-1)
    rejects("expected 1 or more", half_tolerance, noise(0.1), factor=0.5)


RNG = np.random.default_rng(0)


def hsic(first: Floats, second: Floats) -> float:
    """Return the unbiased HSIC, a mean over all ordered quadruples of rows (Song et al. 2012, eq. 4)."""
    ours, theirs = first @ first.T, second @ second.T
    terms = [
        ours[i, j] * (theirs[i, j] + theirs[q, r] - 2.0 * theirs[i, q])
        for i, j, q, r in permutations(range(len(first)), 4)
    ]
    return float(np.mean(terms))


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_unbiased_cka_equals_a_sum_over_quadruples(shift: float) -> None:
    first = RNG.standard_normal((7, 5)) + shift
    second = first[:, :3] + 0.5 * RNG.standard_normal((7, 3))
    expected = hsic(first, second) / np.sqrt(hsic(first, first) * hsic(second, second))
    assert linear_cka(first, second) == pytest.approx(expected, rel=1e-6)


def test_cka_ignores_rotation_and_scale_and_is_unbiased_for_many_features() -> None:
    first = RNG.standard_normal((30, 40))
    rotation, _ = np.linalg.qr(RNG.standard_normal((40, 40)))
    assert linear_cka(first, 3.0 * first @ rotation + 5.0) == pytest.approx(1.0)
    others = [linear_cka(first, RNG.standard_normal((30, 400))) for _ in range(20)]
    assert abs(np.mean([other for other in others if other is not None])) < 0.05, "biased CKA gives more than 0.5"
    assert linear_cka(first[:3], first[:3]) is None
    assert linear_cka(np.ones((8, 3)), np.ones((8, 3))) is None


def test_embedding_measures_match_explicit_loops() -> None:
    """A row that is not finite has no nearest neighbour and is no other row's."""
    noise = np.random.default_rng(6)
    reference = noise.standard_normal((12, 4))
    candidate = reference + 0.6 * noise.standard_normal((12, 4))
    candidate[5] = np.nan

    def cosine(a: Floats, b: Floats) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    def nearest(rows: Floats, row: int, among: list[int]) -> int:
        return max((other for other in among if other != row), key=lambda other: cosine(rows[row], rows[other]))

    usable = [row for row in range(12) if row != 5]
    expected = [
        row != 5 and nearest(candidate, row, usable) == nearest(reference, row, list(range(12))) for row in range(12)
    ]
    found = measure_outputs(reference, candidate, role="embedding")
    assert isinstance(found, EmbeddingMeasures)
    assert found.agreement == sum(expected) / 12
    assert 0 < sum(expected) < 11
    assert found.agreement_bounds is not None
    assert found.agreement_bounds[0] < found.agreement < found.agreement_bounds[1]
    assert (found.nonfinite_images, found.relative_error, found.cosine_min) == (1, np.inf, 0.0)
    whole = measure_outputs(reference[:5], candidate[:5], role="embedding")
    assert isinstance(whole, EmbeddingMeasures)
    cosines = [cosine(*rows) for rows in zip(reference[:5], candidate[:5], strict=True)]
    assert (whole.cosine_mean, whole.cosine_min) == pytest.approx((np.mean(cosines), min(cosines)))
    assert whole.max_abs == pytest.approx(np.abs(reference - candidate)[:5].max())
    assert whole.linear_cka == pytest.approx(linear_cka(reference[:5], candidate[:5]))


def as_map(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return tokens [N,6,C] as maps [N,C,2,3]."""
    return np.moveaxis(tokens, 2, 1).reshape(len(tokens), tokens.shape[2], 2, 3)


@pytest.mark.parametrize("maps", [False, True])
def test_tokens_are_compared_one_by_one(maps: bool) -> None:
    reference = RNG.standard_normal((5, 6, 4))
    candidate = reference + 0.3 * RNG.standard_normal((5, 6, 4))
    candidate[3, 2, 1] = np.nan
    form = as_map if maps else np.asarray
    found = measure_outputs(form(reference), form(candidate), role="feature map")
    assert isinstance(found, FeatureMapMeasures)
    rows = reference.reshape(30, 4), candidate.reshape(30, 4)
    cosines = [
        0.0 if 18 <= row < 24 else float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        for row, (a, b) in enumerate(zip(*rows, strict=True))
    ]
    assert found.token_cosine_mean == pytest.approx(np.mean(cosines))
    assert found.token_cosine_q01 == pytest.approx(np.quantile(cosines, 0.01))
    assert (found.tokens_compared, found.nonfinite_images) == (30, 1)
    whole = measure_outputs(form(reference[:3]), form(candidate[:3]), role="feature map")
    assert isinstance(whole, FeatureMapMeasures)
    agrees = same_neighbour(rows[0][:18], rows[1][:18], np.ones(18, dtype=np.bool_))
    assert whole.neighbour_agreement == some(agrees).mean() == whole.agreement
    assert whole.linear_cka == pytest.approx(linear_cka(rows[0][:18], rows[1][:18]))


def test_excess_tokens_are_sampled_deterministically() -> None:
    drawn = draw_rows(5000)
    assert len(drawn) == MOST_DRAWN == len(set(drawn.tolist()))
    assert np.array_equal(drawn, draw_rows(5000))
    assert draw_rows(3).tolist() == [0, 1, 2]
    reference = RNG.standard_normal((8, 200, 3)).astype(np.float32)
    found = measure_outputs(reference, reference * np.float32(0.5), role="feature map")
    assert isinstance(found, FeatureMapMeasures)
    assert (found.tokens_compared, found.neighbour_agreement) == (MOST_DRAWN, 1.0)
    assert found.linear_cka == pytest.approx(1.0)
    assert found.token_cosine_q01 == pytest.approx(1.0)
