"""Similarity of representations: neighbours, linear CKA and the cosines of tokens, each beside loops over its
definition.
"""

from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from perf.parity.measures import measures
from perf.parity.rows import Floats
from perf.parity.similarity import MOST_DRAWN, drawn_rows, linear_cka, same_neighbour
from perf.parity.vectors import EmbeddingMeasures, FeatureMapMeasures

RNG = np.random.default_rng(0)


def hsic(first: Floats, second: Floats) -> float:
    """The mean over all four different rows (Song et al. 2012, eq. 4)."""
    ours, theirs = first @ first.T, second @ second.T
    terms = [
        ours[i, j] * (theirs[i, j] + theirs[q, r] - 2.0 * theirs[i, q])
        for i, j, q, r in permutations(range(len(first)), 4)
    ]
    return float(np.mean(terms))


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_cka_is_that_of_all_quadruples(shift: float) -> None:
    first = RNG.standard_normal((7, 5)) + shift
    second = first[:, :3] + 0.5 * RNG.standard_normal((7, 3))
    expected = hsic(first, second) / np.sqrt(hsic(first, first) * hsic(second, second))
    assert linear_cka(first, second) == pytest.approx(expected, rel=1e-6)


def test_cka_knows_no_rotation_and_no_scale_and_isnt_fooled_by_many_features() -> None:
    first = RNG.standard_normal((30, 40))
    rotation, _ = np.linalg.qr(RNG.standard_normal((40, 40)))
    assert linear_cka(first, 3.0 * first @ rotation + 5.0) == pytest.approx(1.0)
    others = [linear_cka(first, RNG.standard_normal((30, 400))) for _ in range(20)]
    assert abs(np.mean([other for other in others if other is not None])) < 0.05, "the plain one gives more than 0.5"
    assert linear_cka(first[:3], first[:3]) is None
    assert linear_cka(np.ones((8, 3)), np.ones((8, 3))) is None


def test_neighbours_are_those_of_a_loop() -> None:
    reference = RNG.standard_normal((12, 4))
    candidate = reference + 0.6 * RNG.standard_normal((12, 4))
    usable = np.ones(12, dtype=np.bool_)
    usable[5] = False

    def nearest(rows: Floats, row: int, among: list[int]) -> int:
        def cosine(other: int) -> float:
            return float(rows[row] @ rows[other] / np.linalg.norm(rows[row]) / np.linalg.norm(rows[other]))

        return max((other for other in among if other != row), key=cosine)

    expected = [
        row != 5
        and nearest(candidate, row, [other for other in range(12) if other != 5])
        == nearest(reference, row, list(range(12)))
        for row in range(12)
    ]
    agrees = same_neighbour(reference, candidate, usable)
    assert agrees is not None
    assert agrees.tolist() == expected
    assert 0 < sum(expected) < 11
    assert same_neighbour(reference[:2], candidate[:2], usable[:2]) is None


def as_map(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N,6,C] as [N,C,2,3]."""
    return np.moveaxis(tokens, 2, 1).reshape(len(tokens), tokens.shape[2], 2, 3)


@pytest.mark.parametrize("maps", [False, True])
def test_tokens_are_told_one_by_one(maps: bool) -> None:
    reference = RNG.standard_normal((5, 6, 4))
    candidate = reference + 0.3 * RNG.standard_normal((5, 6, 4))
    candidate[3, 2, 1] = np.nan
    form = as_map if maps else np.asarray
    found = measures(form(reference), form(candidate), role="feature map")
    assert isinstance(found, FeatureMapMeasures)
    rows = reference.reshape(30, 4), candidate.reshape(30, 4)
    cosines = [
        0.0 if 18 <= row < 24 else float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        for row, (a, b) in enumerate(zip(*rows, strict=True))
    ]
    assert found.token_cosine_mean == pytest.approx(np.mean(cosines))
    assert found.token_cosine_q01 == pytest.approx(np.quantile(cosines, 0.01))
    assert found.tokens_compared == 30
    assert found.nonfinite_images == 1
    whole = measures(form(reference[:3]), form(candidate[:3]), role="feature map")
    assert isinstance(whole, FeatureMapMeasures)
    agrees = same_neighbour(rows[0][:18], rows[1][:18], np.ones(18, dtype=np.bool_))
    assert agrees is not None
    assert whole.neighbour_agreement == agrees.mean() == whole.agreement
    assert whole.linear_cka == pytest.approx(linear_cka(rows[0][:18], rows[1][:18]))


def test_more_tokens_than_a_table_holds_are_drawn_alike_each_time() -> None:
    drawn = drawn_rows(5000)
    assert len(drawn) == MOST_DRAWN == len(set(drawn.tolist()))
    assert np.array_equal(drawn, drawn_rows(5000))
    assert drawn_rows(3).tolist() == [0, 1, 2]
    reference = RNG.standard_normal((8, 200, 3)).astype(np.float32)
    found = measures(reference, reference * np.float32(0.5), role="feature map")
    assert isinstance(found, FeatureMapMeasures)
    assert (found.tokens_compared, found.neighbour_agreement) == (MOST_DRAWN, 1.0)
    assert found.linear_cka == pytest.approx(1.0)
    assert found.token_cosine_q01 == pytest.approx(1.0)


def test_embeddings_have_cka_too() -> None:
    rows = RNG.standard_normal((9, 4))
    found = measures(rows, rows * 2.0, role="embedding")
    assert isinstance(found, EmbeddingMeasures)
    assert found.linear_cka == pytest.approx(1.0)
