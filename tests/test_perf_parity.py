"""Verdicts of parity links and records, their JSON form, and shifts between calibration and test images."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from perf.parity.labels import accuracy_on_labels
from perf.parity.link import Link, LinkKind
from perf.parity.locate import FaultLocation
from perf.parity.measures import figures_by_input
from perf.parity.parity import ImageSet, Parity, parity_from_value
from perf.parity.shift import Scatter, SiteShift, Stats, shift_of_sites, site_shift
from perf.parity.structure import check_output_values
from perf.parity.tolerance import Tolerance, exact_tolerance, user_tolerance
from tests.links import link_between
from tests.refusals import rejects

Floats = NDArray[np.float64]
REF = np.random.default_rng(0).standard_normal((40, 10)) * 4
ONE_PERCENT = user_tolerance(max_error=0.01)
KINDS: tuple[LinkKind, ...] = ("reduced", "exact")


def linked(
    *candidates: Floats, tolerance: Tolerance = ONE_PERCENT, kind: LinkKind = "reduced", name: str = "r"
) -> Link:
    by_batch = dict(zip((1, 7, 64), candidates, strict=False))
    return link_between(REF, by_batch, kind=kind, name=name, tolerance=tolerance)


def parity(*links: Link, **more: Any) -> Parity:
    return Parity(images=ImageSet(count=40, digest="sha256:00"), links=links, **more)


def test_link_passes_within_and_fails_beyond_the_bound() -> None:
    good, bad = linked(REF * 1.009), linked(REF * 1.011)
    assert (good.status, bad.status) == ("PASS", "FAIL")
    assert "0.009 within 0.01" in good.reason
    assert "0.011 over 0.01" in bad.reason


def test_worst_batch_is_reported() -> None:
    found = linked(REF, REF * 1.02, REF * 1.001)
    assert (found.batch, found.status) == (7, "FAIL")
    assert "(at batch 7)" in found.reason
    assert [b.batch for b in found.batches] == [1, 7, 64]
    assert found.measures.relative_error == pytest.approx(0.02)


def test_agreement_is_judged_at_every_batch() -> None:
    def found(flips: int) -> Link:
        flipped = REF.copy()
        flipped[:flips] *= -1
        return linked(REF * 3, flipped, tolerance=user_tolerance(min_agreement=0.99))

    failed, undecided = found(3), found(1)
    assert (failed.batch, failed.status) == (7, "FAIL")
    words = "92.50 % (80.14 % to 97.42 % at 95 % confidence), limit 99 % (3 of 40 images flipped)"
    assert words in failed.reason
    assert (undecided.batch, undecided.status) == (7, "INCONCLUSIVE")
    assert "97.50 % (87.12 % to 99.56 % at 95 % confidence), limit 99 %: the interval" in undecided.reason


def test_decisive_flips_fail_an_exact_link_within_its_bound() -> None:
    ref = np.array([[1.0, 1.0 - 1e-9], [1000.0, 0.0]])
    tolerance = Tolerance(rule="r", max_relative_error=1.0, max_decisive_flips=0, margin_noise=1e-6)
    tie, flip = ref[:, ::-1][:1], ref[1:, ::-1]

    def reason(candidate: Floats) -> str:
        return link_between(ref, candidate, kind="exact", tolerance=tolerance).reason

    assert "within" in reason(np.concatenate([tie, ref[1:]]))
    assert "over" in reason(np.concatenate([tie, flip]))
    assert "1 top-1 flips" in reason(np.concatenate([ref[:1], [[499.0, 501.0]]]))


def test_nan_and_constant_outputs_fail_without_limits() -> None:
    spoilt = REF.copy()
    spoilt[5, 5] = np.nan
    assert linked(spoilt, tolerance=user_tolerance()).reason == "NaN or Inf on 1 of 40 images"
    constant = linked(np.tile(REF.mean(axis=0), (40, 1)), tolerance=user_tolerance())
    assert constant.status == "FAIL"
    assert "hardly depend on the image" in constant.reason
    assert linked(REF * 1.5, tolerance=user_tolerance()).status == "UNJUDGED"


def test_verdict_follows_from_the_links() -> None:
    good, free = linked(REF, name="good"), linked(REF, tolerance=user_tolerance(), name="free")
    assert parity(good).verdict == "PASS"
    assert parity(good).line == "PASS (1 link judged) on 40 images"
    assert parity(good, free).verdict == "UNJUDGED", "an unjudged link proves nothing"
    assert parity(good, free).line.startswith("UNJUDGED (1 link judged, 1 measured without a limit; no limit judged")
    assert parity(good, free).to_json()["line"] == parity(good, free).line
    assert parity(free).line == "UNJUDGED (0 links judged, 1 measured without a limit) on 40 images"
    bad = parity(good, free, linked(REF * 2, name="bad"))
    assert bad.line.startswith(
        "FAIL (2 links judged, 1 measured without a limit; no limit judged logits) on 40 images: bad: "
    )
    failed = parity(good, structure=tuple(check_output_values("b", {"logits": REF * np.nan})))
    assert failed.verdict == "FAIL"
    assert "finite of b: NaN or Inf on 40 of 40 images" in failed.reason


def test_random_inputs_are_reported_as_random() -> None:
    record = Parity(images=ImageSet(count=40, digest="", kind="random"), links=(linked(REF),))
    assert "on 40 random inputs" in record.reason


def full() -> Parity:
    spoilt = REF.copy()
    spoilt[0, 0] = np.inf
    return parity(
        linked(REF, kind="exact", tolerance=exact_tolerance(products=38, largest_logit=9.0), name="onnx"),
        linked(REF, spoilt, name="fp16"),
        structure=tuple(check_output_values("b", {"logits": spoilt})),
        located=(
            FaultLocation(link="fp16", site="blocks.1.attn", measure="nonfinite", value=float("inf"), noise=1e-3,
                    largest_activation=7e4, half_limit=65504.0, reason="r", command="c"),
        ),
        shift=shift_of_sites([shifted(parts(4))], images=200),
        accuracy=(accuracy_on_labels("b", REF, REF.argmax(axis=1)),),
        per_image="parity.npz",
    )  # fmt: skip


def test_parity_record_round_trips() -> None:
    raw = json.loads(json.dumps(full().to_json(), allow_nan=False))
    assert (raw["kind"], raw["version"], raw["verdict"], raw["batches"]) == ("parity", 1, "FAIL", [1, 7])
    assert raw["links"][1]["measures"]["relative_error"] is None
    assert parity_from_value(raw, where="parity.json") == full()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("kind",), "bench", "expected a parity record, got 'bench'"),
        (("version",), 2, "parity record of version 2, written by a newer corp-deploy; this tool reads version 1"),
        (("links", 0, "measures", "flips"), "0", r"measures.flips: got '0', expected a whole number"),
        (("links", 0, "kind"), "half-way", r"links\[0\].kind: got 'half-way', expected exact or half or"),
        (("links",), [], "one or more links with different names"),
        (("links", 0, "tolerance", "margin_noise"), -1, r"links\[0\].tolerance: margin noise: got -1.0, expected"),
    ],
)
def test_damaged_records_are_refused(path: tuple[str | int, ...], value: object, words: str) -> None:
    raw = full().to_json()
    at: Any = raw
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    rejects(words, parity_from_value, raw, where="parity.json")


def test_outputs_of_unexpected_size_are_refused_with_their_model() -> None:
    rejects(
        r"reduced: gives logits \[40, 3\] where dense gives \[40, 10\], expected the same sizes", linked, REF[:, :3]
    )


def test_side_file_has_one_figure_per_image() -> None:
    arrays = figures_by_input(REF, {"reduced": REF * 1.5, "fp16": REF})
    assert arrays["reduced.relative_error"] == pytest.approx(np.full(40, 0.5))
    assert arrays["fp16.agrees"].all()
    assert {array.shape for array in arrays.values()} == {(40,)}


def test_extra_batch_sizes_may_run_fewer_images_and_are_judged_on_rounding_only() -> None:
    some = REF[:8] * 1.02
    by_batch = {1: some, 32: REF * 1.001}
    reduced, exact = (link_between(REF, by_batch, kind=kind, tolerance=ONE_PERCENT) for kind in KINDS)
    assert (reduced.status, reduced.batch, reduced.measures.images) == ("PASS", 32, 40)
    assert (exact.status, exact.batch, exact.measures.images) == ("FAIL", 1, 8)
    assert [(each.batch, each.images) for each in reduced.batches] == [(1, 8), (32, None)]
    record = parity(reduced)
    assert parity_from_value(record.to_json(), where="r").links == record.links
    some[3, 2] = np.nan
    assert link_between(REF, by_batch, tolerance=ONE_PERCENT).status == "FAIL"


F = 6
MIX = np.random.default_rng(0).standard_normal((F, F))


def stats(images: int, seed: int, *, offset: float = 0.0, scale: float = 1.0) -> Stats:
    """Draw ten tokens per image that share most of their value, so that far fewer draws are independent."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((images, 1, F)) + 0.2 * rng.standard_normal((images, 10, F))
    tokens = (shared @ MIX * scale + offset).reshape(-1, F)
    return Stats(images=images, mean_F=tokens.mean(axis=0), covariance_FF=np.cov(tokens.T, bias=True))


def parts(seed: int, *, offset: float = 0.0, scale: float = 1.0, each: int = 25) -> list[Stats]:
    return [stats(each, 1000 * seed + i, offset=offset, scale=scale) for i in range(8)]


CALIBRATED = stats(400, 7)


def scattered(every: Sequence[Stats]) -> Scatter:
    scatter = Scatter(CALIBRATED.mean_F)
    for part in every:
        scatter.add(part)
    return scatter


def shifted(every: Sequence[Stats], calibrated: Stats = CALIBRATED, site: str = "s") -> SiteShift:
    return site_shift(site, calibrated, scattered(every))


def test_images_of_the_same_distribution_pass_in_many_repetitions() -> None:
    assert [shifted(parts(seed)).status for seed in range(1, 60)] == ["PASS"] * 59


def test_noise_equals_the_spread_of_repetitions() -> None:
    found = [shifted(parts(seed), stats(400, 5000 + seed)) for seed in range(1, 60)]
    for distance, noise in (("mean_distance", "mean_noise"), ("covariance_distance", "covariance_noise")):
        seen = np.sqrt(np.mean([getattr(s, distance) ** 2 for s in found]))
        said = np.sqrt(np.mean([getattr(s, noise) ** 2 for s in found]))
        assert seen == pytest.approx(said, rel=0.25), distance


@pytest.mark.parametrize(("offset", "scale"), [(1.5, 1.0), (0.0, 1.6), (0.0, 0.5)])
def test_shifted_images_are_reported_with_the_site(offset: float, scale: float) -> None:
    moved = shifted(parts(3, offset=offset, scale=scale), site="blocks.1.mlp")
    found = shift_of_sites([shifted(parts(4), site="blocks.0.mlp"), moved], images=200)
    assert [s.status for s in found.sites] == ["PASS", "NOTED"]
    assert (found.status, found.images) == ("NOTED", 200)
    assert "1 of 2 sites" in found.reason
    assert "blocks.1.mlp" in found.reason


def test_few_images_are_not_reported_as_shifted() -> None:
    assert {shifted(parts(seed, each=2)).status for seed in range(1, 40)} == {"PASS"}


def test_mismatched_moments_are_refused() -> None:
    rejects("expected 2 or more", shifted, parts(1)[:1])
    narrow = Stats(images=3, mean_F=np.zeros(2), covariance_FF=np.eye(2))
    rejects("got width 2, expected the calibrated 6", scattered, [narrow])


def test_incremental_parity_equals_parity_of_all_parts() -> None:
    every = parts(11)
    centre = CALIBRATED.mean_F
    found = scattered(every)
    means = np.stack([part.mean_F for part in every])
    second = np.mean([part.covariance_FF + np.outer(part.mean_F, part.mean_F) for part in every], axis=0)
    np.testing.assert_allclose(found.mean_F, means.mean(axis=0))
    np.testing.assert_allclose(found.covariance_FF(), second - np.outer(found.mean_F, found.mean_F))
    assert found.mean_scatter() == pytest.approx(np.square(means - means.mean(axis=0)).sum())
    covariances = np.stack([p.covariance_FF + np.outer(p.mean_F - centre, p.mean_F - centre) for p in every])
    direct = np.square(covariances - covariances.mean(axis=0)).sum()
    assert found.covariance_scatter() == pytest.approx(direct, rel=1e-9)
