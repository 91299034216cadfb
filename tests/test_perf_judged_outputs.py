"""Judging every output of a model, single logits by their threshold, and accuracy and own metrics by their change."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from corp_deploy.proof.gate import parity_row
from ground.files import write_json
from ground.ports import OutputPort, Role
from perf.gate.evidence import Evidence
from perf.gate.gate import Gate, JudgedRule, judge
from perf.gate.parity_figures import find_judged_outputs
from perf.gate.rule import rule_from_text
from perf.parity.labels import OwnMetric, accuracy_on_labels, mcnemar
from perf.parity.link import Link, LinkKind
from perf.parity.logits import measure_logits, threshold_of
from perf.parity.measures import figures_by_input
from perf.parity.parity import ImageSet, Parity, parity_from_value
from perf.parity.tolerance import EXCLUDED, Tolerance, judge_measures, user_tolerance
from perf.stats.decision import paired_interval
from tests.links import link_between
from tests.refusals import rejects

Floats = NDArray[np.float64]
RNG = np.random.default_rng(3)
ROWS: Floats = RNG.standard_normal((60, 4))
LOGIT: Floats = RNG.standard_normal((60, 1))
WITHIN = user_tolerance(max_error=0.05)
FREE = user_tolerance()


def linked(
    output: str, tolerance: Tolerance, *, kind: LinkKind = "reduced", role: Role = "embedding", by: float = 0.01
) -> Link:
    port = OutputPort(name=output, role=role)
    return link_between(ROWS, ROWS * (1 + by), kind=kind, tolerance=tolerance, several=True, port=port)


def proof(*links: Link, **more: Any) -> Parity:
    return Parity(images=ImageSet(count=60, digest="sha256:00"), links=links, **more)


def test_single_logit_agrees_on_the_same_side_of_its_threshold() -> None:
    moved = LOGIT + 0.4
    found = measure_logits(LOGIT, moved, margin_noise=0.0)
    same = sum((before > 0) == (after > 0) for before, after in zip(LOGIT[:, 0], moved[:, 0], strict=True))
    assert 0 < same < 60
    assert found.top1_agreement == same / 60
    assert (found.flips, found.decisive_flips, found.threshold) == (60 - same, 60 - same, 0.0)
    assert found.positives == int((LOGIT > 0).sum())
    # The Kullback-Leibler divergence of two Bernoulli distributions, averaged over images.
    p, q = (1 / (1 + np.exp(-side[:, 0])) for side in (LOGIT, moved))
    expected = np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
    assert found.kl_mean == pytest.approx(expected, rel=1e-9)
    assert figures_by_input(LOGIT, {"b": moved})["b.agrees"].sum() == same
    assert measure_logits(LOGIT, moved, margin_noise=0.0, threshold=9.0).top1_agreement is None


@pytest.mark.parametrize(
    ("answers", "asked", "threshold"),
    [
        (LOGIT, None, 0.0),
        (1 / (1 + np.exp(-LOGIT)), None, 0.5),
        (LOGIT, 0.7, 0.7),
        (ROWS, None, None),
        (ROWS, 0.7, None),
        (LOGIT[:, 0], None, 0.0),
    ],
)
def test_threshold_of_a_single_logit(answers: Floats, asked: float | None, threshold: float | None) -> None:
    assert threshold_of(answers, asked) == threshold


def test_single_logit_always_on_one_side_has_no_agreement() -> None:
    ages = 20 + 60 * RNG.random((50, 1))
    found = measure_logits(ages, ages + 1, margin_noise=0.0)
    assert found.top1_agreement is None
    status, reason = judge_measures(found, user_tolerance(min_agreement=0.9))
    assert status == "INCONCLUSIVE"
    assert re.search("above 0 on every image.*another --logit-threshold", reason)
    assert judge_measures(found, user_tolerance(max_error=0.1))[0] == "PASS"


def test_one_number_per_image_is_a_single_logit() -> None:
    both = [measure_logits(side, side + 0.4, margin_noise=0.0) for side in (LOGIT, LOGIT[:, 0])]
    assert both[0] == both[1]


def test_accuracy_of_a_single_logit_uses_labels_0_and_1() -> None:
    labels = (LOGIT[:, 0] > 0.3).astype(np.int64)
    right = sum(int(value > 0) == label for value, label in zip(LOGIT[:, 0], labels, strict=True))
    assert accuracy_on_labels("b", LOGIT, labels).correct == right
    assert accuracy_on_labels("b", LOGIT, labels, threshold=0.3).correct == 60
    rejects("got classes 0 to 2, expected 0 to 1", accuracy_on_labels, "b", LOGIT, np.arange(60) % 3)


def test_chance_agreement_equals_that_of_permuted_labels() -> None:
    rows, labels = np.eye(5)[np.arange(500) % 5], np.arange(500) % 5
    assert accuracy_on_labels("b", rows, labels).chance == pytest.approx(0.2)
    shuffled = np.random.default_rng(0).permutation(labels)
    good, bad = accuracy_on_labels("b", rows, labels), accuracy_on_labels("b", rows, shuffled)
    assert (good.is_near_chance, bad.is_near_chance) == (False, True)
    assert not proof(linked("a", WITHIN), accuracy=(good,)).warnings
    (warning,) = proof(linked("a", WITHIN), accuracy=(bad,)).warnings
    assert "no better than chance (20.00 %)" in warning
    one_class = np.zeros(500, dtype=np.int64)
    assert accuracy_on_labels("b", np.eye(5)[one_class], np.where(np.arange(500) < 480, 0, 1)).is_near_chance
    assert not accuracy_on_labels("b", np.eye(5)[one_class], one_class).is_near_chance


@pytest.mark.parametrize(
    ("links", "verdict", "unjudged"),
    [
        ((linked("class", WITHIN), linked("boxes", WITHIN)), "PASS", ()),
        ((linked("class", WITHIN), linked("boxes", FREE)), "UNJUDGED", ("boxes",)),
        ((linked("class", WITHIN), linked("boxes", EXCLUDED)), "PASS", ()),
        ((linked("class", WITHIN), linked("boxes", EXCLUDED, by=9.0)), "PASS", ()),
        ((linked("class", FREE), linked("class", WITHIN, kind="exact")), "UNJUDGED", ("class",)),
        ((linked("class", FREE), linked("class", WITHIN, kind="whole")), "PASS", ()),
        ((linked("class", WITHIN, kind="exact"), linked("class", FREE, kind="whole")), "PASS", ()),
        ((linked("class", WITHIN, by=0.5), linked("boxes", FREE)), "FAIL", ("boxes",)),
    ],
)
def test_proof_passes_only_if_limits_judge_every_output(
    links: tuple[Link, ...], verdict: str, unjudged: tuple[str, ...]
) -> None:
    found = proof(*(replace(each, name=f"{place}") for place, each in enumerate(links)))
    assert (found.verdict, found.unjudged) == (verdict, unjudged)
    read = parity_from_value(json.loads(json.dumps(found.to_json())), where="parity.json")
    assert (read.verdict, read.unjudged, read.excluded) == (verdict, unjudged, found.excluded)


def gated(home: Path, found: Parity, *rules: str) -> Gate:
    write_json(home / "parity.json", found.to_json())
    read = [rule_from_text(text) for text in rules]
    rows = judge(read, Evidence(parity=found)).rules if read else ()
    return Gate(rules=(parity_row(home / "parity.json", read), *rows))


@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        ((), "INCONCLUSIVE"),
        (("relative_error@boxes > 0.05",), "INCONCLUSIVE"),
        (("relative_error@class > 0.05", "relative_error@boxes > 0.05"), "PASS"),
        (("relative_error > 0.05",), "PASS"),
        (("relative_error > 0.005",), "FAIL"),
        (("relative_error@boxes > 0.005",), "FAIL"),
    ],
)
def test_gate_passes_only_if_limits_or_rules_judge_every_output(
    tmp_path: Path, rules: tuple[str, ...], verdict: str
) -> None:
    found = gated(tmp_path, proof(linked("class", FREE), linked("boxes", FREE)), *rules)
    assert found.verdict == verdict, found
    assert (found.exit_code == 0) == (verdict == "PASS")


def test_gate_names_unjudged_outputs(tmp_path: Path) -> None:
    row = gated(tmp_path, proof(linked("class", WITHIN), linked("boxes", FREE))).rules[0]
    assert row.verdict == "INCONCLUSIVE"
    assert "neither a limit of verify nor a rule judges boxes" in row.message
    assert find_judged_outputs(rule_from_text("speedup@b1 < 1"), proof(linked("boxes", FREE))) == []


def labelled(only_dense: int, only_reduced: int, *, images: int = 1000, right: int = 800) -> Parity:
    """Make a record in which both models are right on `right` images and each one alone on some more."""
    labels = np.zeros(images, dtype=np.int64)
    sides = []
    for extra in (slice(right, right + only_dense), slice(right + only_dense, right + only_dense + only_reduced)):
        logits = np.tile([0.0, 1.0], (images, 1))
        logits[:right] = logits[extra] = [1.0, 0.0]
        sides.append(logits)
    found = [accuracy_on_labels(name, side, labels) for name, side in zip(("dense", "reduced"), sides, strict=True)]
    pair = mcnemar("dense", sides[0], "reduced", sides[1], labels)
    return proof(linked("class", WITHIN, role="logits"), accuracy=tuple(found), comparisons=(pair,))


def one(found: Parity, rule: str) -> JudgedRule:
    return judge([rule_from_text(rule)], Evidence(parity=found)).rules[0]


def test_accuracy_rule_uses_the_paired_difference() -> None:
    """On 1,000 images each accuracy is uncertain by 2.5 points, and the paired difference by half a point."""
    assert one(labelled(4, 4), "accuracy < dense - 0.01").verdict == "PASS"
    failed = one(labelled(40, 5), "accuracy < dense - 0.01")
    assert (failed.verdict, "paired" in failed.message) == ("FAIL", True), failed.message
    between = one(labelled(12, 2), "accuracy < dense - 0.01")
    assert between.verdict == "INCONCLUSIVE"
    assert re.search("differs from dense by -1.00 %.*paired", between.message), between.message
    assert one(labelled(4, 4), "accuracy < 0.7").verdict == "PASS"
    assert one(labelled(4, 4), "dense.accuracy < 0.9").verdict == "FAIL"
    assert one(labelled(4, 4), "accuracy < dense * 0.9").verdict == "PASS"
    assert find_judged_outputs(rule_from_text("accuracy < 0.7"), labelled(1, 1)) == ["class"]


def test_accuracy_rule_without_labels_is_an_error() -> None:
    rejects("made without labels; verify again with --labels", one, proof(linked("a", WITHIN)), "accuracy < 0.9")
    rejects("exists for 'dense' and for candidates", one, labelled(1, 1), "teacher.accuracy < 0.9")


def score_at(gained: int, lost: int, count: int, difference: float) -> float:
    """Return Tango's score statistic, whose most likely share of losses comes from a refined grid."""
    low, high = max(0.0, -difference), (1 - difference) / 2
    for _ in range(30):
        losses_G = np.linspace(low, high, 41)[1:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = [np.where(n > 0, n * np.log(share), 0.0) for n, share in (
                (gained, losses_G + difference), (lost, losses_G),
                (count - gained - lost, 1 - 2 * losses_G - difference))]  # fmt: skip
        place = int(np.nanargmax(sum(terms)))
        step = (high - low) / 40
        low, high = losses_G[place] - step, losses_G[place] + step
    variance = count * (2 * (low + high) / 2 + difference * (1 - difference))
    return (gained - lost - count * difference) / math.sqrt(variance)


@pytest.mark.parametrize(("gained", "lost", "count"), [(9, 5, 32), (3, 0, 40), (20, 20, 200), (2, 7, 1000), (0, 0, 20)])
def test_paired_interval_ends_where_the_score_test_rejects(gained: int, lost: int, count: int) -> None:
    low, high = paired_interval(gained, lost, count)
    assert low <= (gained - lost) / count <= high
    assert score_at(gained, lost, count, low) == pytest.approx(1.959964, abs=1e-3)
    assert score_at(gained, lost, count, high) == pytest.approx(-1.959964, abs=1e-3)
    assert paired_interval(gained, lost, count, 0.0) == ((gained - lost) / count,) * 2


def own(model: str, value: float, **errors: Any) -> OwnMetric:
    return OwnMetric(name="score", model=model, value=value, command="c {outputs}", sha256="0" * 64, **errors)


def test_metric_without_values_per_image_is_judged_by_its_point() -> None:
    links = (linked("a", WITHIN),)
    point = proof(*links, metrics=(own("dense", 0.8), own("reduced", 0.79)))
    row = one(point, "metric.score < dense - 0.005")
    assert (row.verdict, "point only" in row.message) == ("FAIL", True)
    errors = {"images": 400, "error": 0.02}
    paired = proof(*links, metrics=(own("dense", 0.8, **errors, change_error=0.0),
                                    own("reduced", 0.79, **errors, change_error=0.004)))  # fmt: skip
    row = one(paired, "metric.score < dense - 0.005")
    assert row.verdict == "INCONCLUSIVE"
    assert "images would decide" in row.message
    assert one(paired, "metric.score < dense - 0.05").verdict == "PASS"
    assert "point only" not in one(paired, "metric.score < dense - 0.05").message


def log_chance(parts: Sequence[int], shares: Sequence[float]) -> float:
    """Return the log of the multinomial probability of these counts; a count of 0 has any share."""
    ways = math.lgamma(sum(parts) + 1) - sum(math.lgamma(part + 1) for part in parts)
    return ways + sum(part * math.log(share) if share else -math.inf for part, share in zip(parts, shares, strict=True)
                      if part)  # fmt: skip


def exact_coverage(count: int, gains: float, losses: float) -> float:
    """Return the probability that the interval holds gains - losses, by enumeration of the changed answers.

    Both ends rise with the gained answers, so for each number of lost ones the intervals that hold it are one range.
    """
    ends, change, covered, whole = lru_cache(paired_interval), gains - losses, 0.0, 0.0
    first = past = 0
    spread = 7 * math.sqrt(count * losses) + 9
    for lost in range(max(0, int(count * losses - spread)), min(count, int(count * losses + spread)) + 1):
        while first <= count - lost and ends(first, lost, count)[1] < change:
            first += 1
        past = max(past, first)
        while past <= count - lost and ends(past, lost, count)[0] <= change:
            past += 1
        reach = 7 * math.sqrt(count * gains) + 9
        for gained in range(max(0, int(count * gains - reach)), min(count - lost, int(count * gains + reach)) + 1):
            counts = (gained, lost, count - gained - lost)
            chance = math.exp(log_chance(counts, (gains, losses, 1 - gains - losses)))
            whole += chance
            covered += chance * (first <= gained < past)
    assert whole == pytest.approx(1, abs=1e-6)
    return covered


@pytest.mark.parametrize("count", [50, 200, 2000])
@pytest.mark.parametrize("changed", [0.005, 0.02, 0.1])
@pytest.mark.parametrize("share_gained", [0.5, 0.25, 0.0])
def test_paired_interval_covers_the_true_change(count: int, changed: float, share_gained: float) -> None:
    """Of few changed answers the interval is wider than it needs to be, as every one of these is."""
    found = exact_coverage(count, changed * share_gained, changed * (1 - share_gained))
    assert 0.93 < found < (0.98 if count * changed >= 4 else 1.0000001), found


def test_ends_of_a_paired_interval_rise_with_gained_answers() -> None:
    for lost in range(0, 51, 5):
        ends = [paired_interval(gained, lost, 50) for gained in range(51 - lost)]
        assert all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(ends))
