"""Shift: silent on other samples of the same images, loud on shifted ones, and its noise is what repetition shows."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.records import json_from_record, record_from_value
from perf.parity.shift import Shift, Stats, scattered, shift, site_shift

F = 6
Floats = NDArray[np.float64]
MIX = np.random.default_rng(0).standard_normal((F, F))


def stats(images: int, seed: int, *, offset: float = 0.0, scale: float = 1.0) -> Stats:
    """Ten tokens an image that share most of their value: far fewer independent draws than tokens."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((images, 1, F)) + 0.2 * rng.standard_normal((images, 10, F))
    tokens = (shared @ MIX * scale + offset).reshape(-1, F)
    return Stats(images=images, mean_F=tokens.mean(axis=0), covariance_FF=np.cov(tokens.T, bias=True))


def parts(seed: int, *, offset: float = 0.0, scale: float = 1.0, each: int = 25) -> list[Stats]:
    return [stats(each, 1000 * seed + i, offset=offset, scale=scale) for i in range(8)]


CALIBRATED = stats(400, 7)


def test_other_images_of_the_same_kind_pass_over_many_repetitions() -> None:
    found = [site_shift("s", CALIBRATED, scattered(parts(seed), CALIBRATED.mean_F)) for seed in range(1, 60)]
    assert [s.status for s in found] == ["PASS"] * 59


def test_the_noise_is_what_repetition_shows() -> None:
    found = [
        site_shift("s", stats(400, 5000 + seed), scattered(parts(seed), CALIBRATED.mean_F)) for seed in range(1, 60)
    ]
    for distance, noise in (("mean_distance", "mean_noise"), ("covariance_distance", "covariance_noise")):
        seen = np.sqrt(np.mean([getattr(s, distance) ** 2 for s in found]))
        said = np.sqrt(np.mean([getattr(s, noise) ** 2 for s in found]))
        assert seen == pytest.approx(said, rel=0.25), distance


@pytest.mark.parametrize(("offset", "scale"), [(1.5, 1.0), (0.0, 1.6), (0.0, 0.5)])
def test_shifted_images_are_noted_and_the_site_named(offset: float, scale: float) -> None:
    moved = parts(3, offset=offset, scale=scale)
    found = shift({"blocks.0.mlp": CALIBRATED, "blocks.1.mlp": CALIBRATED},
                  {"blocks.0.mlp": parts(4), "blocks.1.mlp": moved})  # fmt: skip
    assert [s.status for s in found.sites] == ["PASS", "NOTED"]
    assert (found.status, found.images) == ("NOTED", 200)
    assert "1 of 2 sites" in found.reason
    assert "blocks.1.mlp" in found.reason


def test_few_images_are_not_called_shifted() -> None:
    assert {
        site_shift("s", CALIBRATED, scattered(parts(seed, each=2), CALIBRATED.mean_F)).status for seed in range(1, 40)
    } == {"PASS"}


def test_equal_statistics_have_no_distance() -> None:
    found = site_shift("s", CALIBRATED, scattered([CALIBRATED, CALIBRATED], CALIBRATED.mean_F))
    assert found.mean_distance == pytest.approx(0, abs=1e-12)
    assert found.mean_noise == 0
    assert found.covariance_noise == pytest.approx(0, abs=1e-6)
    assert found.covariance_distance == pytest.approx(0, abs=1e-12)


def test_the_record_survives() -> None:
    found = shift({"a": CALIBRATED}, {"a": parts(4)})
    assert record_from_value(json_from_record(found), Shift, where="w") == found


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="sites only on one side: b"):
        shift({"a": CALIBRATED}, {"a": parts(1), "b": parts(1)})
    with pytest.raises(BadInput, match="expected 2 or more"):
        shift({"a": CALIBRATED}, {"a": parts(1)[:1]})
    narrow = Stats(images=3, mean_F=np.zeros(2), covariance_FF=np.eye(2))
    with pytest.raises(BadInput, match="got width 2, expected the calibrated 6"):
        shift({"a": CALIBRATED}, {"a": [narrow, narrow]})


def test_parts_added_one_by_one_are_what_all_of_them_are_together() -> None:
    every = parts(11)
    centre = CALIBRATED.mean_F
    found = scattered(every, centre)
    means = np.stack([part.mean_F for part in every])
    second = np.mean([part.covariance_FF + np.outer(part.mean_F, part.mean_F) for part in every], axis=0)
    np.testing.assert_allclose(found.mean_F, means.mean(axis=0))
    np.testing.assert_allclose(found.covariance_FF(), second - np.outer(found.mean_F, found.mean_F))
    assert found.mean_scatter() == pytest.approx(np.square(means - means.mean(axis=0)).sum())
    covariances = np.stack([p.covariance_FF + np.outer(p.mean_F - centre, p.mean_F - centre) for p in every])
    direct = np.square(covariances - covariances.mean(axis=0)).sum()
    assert found.covariance_scatter() == pytest.approx(direct, rel=1e-9)
