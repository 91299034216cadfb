"""Each structural test passes a sound function and finds the one defect it is for."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, select_rows
from perf.parity import structure
from perf.parity.structure import StructuralTest

Array = NDArray[np.float32]
IMAGES: Array = np.random.default_rng(0).standard_normal((8, 3, 4, 4)).astype(np.float32)
FEEDS = {"images": IMAGES}
ONE = {"images": IMAGES[:1]}
MAP = np.random.default_rng(1).standard_normal((48, 5)).astype(np.float32)


def sound(images: Array) -> Array:
    out: Array = images.reshape(len(images), -1) @ MAP
    return out


def one_slot_off(images: Array) -> Array:
    logits = sound(images)
    logits[2::4] += 0.01
    return logits


def stale_slot(images: Array) -> Array:
    """Copy the first slot's answer into the last, which one image repeated in every slot can't show."""
    logits = sound(images)
    logits[-1] = logits[0]
    return logits


def depends_on_the_batch(images: Array) -> Array:
    return sound(images - images.mean(axis=0) * np.float32(0.01))


def nan_when_large(images: Array) -> Array:
    return np.where(np.abs(images).max() > 5, np.float32(np.nan), sound(images))


def named(answer: Callable[[Array], Array]) -> structure.Run:
    """Return the function as a model of one named input and output."""
    return lambda feeds: {"logits": answer(feeds["images"])}


def in_batches(answer: Callable[[Array], Array], batch: int) -> Outputs:
    rows = [answer(IMAGES[start : start + batch]) for start in range(0, len(IMAGES), batch)]
    return {"logits": np.concatenate(rows)}


def test_batch_slot_dependence_names_the_slots() -> None:
    found = structure.check_batch_slots("r", named(one_slot_off), ONE, batch=8, bound=1e-5)
    assert (found.status, found.test) == ("FAIL", "batch-slot")
    assert "slots 2, 6 differ" in found.reason
    assert found.value > found.bound
    assert structure.check_batch_slots("r", named(sound), ONE, batch=8, bound=1e-5).status == "PASS"


def test_permutation_test_finds_a_stale_slot() -> None:
    assert structure.check_batch_slots("r", named(stale_slot), ONE, batch=8, bound=1e-5).status == "PASS"
    assert structure.check_permutation("r", named(stale_slot), FEEDS, bound=1e-5).status == "FAIL"
    assert structure.check_permutation("r", named(sound), FEEDS, bound=1e-5).status == "PASS"


def test_batch_one_is_compared_with_larger_batches() -> None:
    def at(answer: Callable[[Array], Array]) -> list[StructuralTest]:
        return structure.check_batch_sizes("r", {b: in_batches(answer, b) for b in (1, 3, 8)}, bound=1e-5)

    assert [f.status for f in at(sound)] == ["PASS", "PASS"]
    broken = at(depends_on_the_batch)
    assert [f.status for f in broken] == ["FAIL", "FAIL"]
    assert "batch 3 against 1" in broken[0].reason
    assert structure.check_batch_sizes("r", {4: {"logits": sound(IMAGES)}}, bound=1e-5) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_outputs_are_found(bad: float) -> None:
    logits = sound(IMAGES)
    logits[1, 2] = bad
    finite, constant = structure.check_output_values("r", {"logits": logits})
    assert (finite.status, constant.status) == ("FAIL", "PASS")
    assert "on 1 of 8 images" in finite.reason


def test_constant_outputs_are_found() -> None:
    alike = np.tile(sound(IMAGES)[:1], (8, 1))
    for rows, status in ((alike, "FAIL"), (np.zeros((8, 5)), "FAIL"), (sound(IMAGES), "PASS")):
        assert [f.status for f in structure.check_output_values("r", {"logits": rows})] == ["PASS", status]
    assert [f.test for f in structure.check_output_values("r", {"logits": sound(IMAGES[:1])})] == ["finite"]


def test_outputs_of_the_timed_run_are_checked() -> None:
    rows = sound(IMAGES)
    verified = {"logits": rows}
    assert structure.check_timed_run("r", verified, verified, bound=1e-6).status == "PASS"
    assert structure.check_timed_run("r", {"logits": rows[::-1]}, verified, bound=1e-6).status == "FAIL"
    assert structure.check_timed_run("r", {"logits": rows * np.float32(np.nan)}, verified, bound=1e-6).value == np.inf


def test_images_outside_the_calibrated_range_are_reported() -> None:
    found = structure.check_calibrated_range("r", IMAGES, low=-1.0, high=1.0)
    assert (found.status, found.value) == ("NOTED", 1.0)
    assert structure.check_calibrated_range("r", IMAGES, low=-9.0, high=9.0).status == "PASS"


def test_extreme_inputs_give_finite_outputs() -> None:
    assert [each.status for each in structure.check_extremes("r", named(sound), FEEDS)] == ["PASS"]
    (found,) = structure.check_extremes("r", named(nan_when_large), FEEDS)
    assert found.status == "FAIL"
    assert "8 of 8 images with all values times 4" in found.reason


def test_batch_size_with_fewer_images_is_compared_on_those() -> None:
    rows = {8: in_batches(sound, 8), 1: select_rows(in_batches(sound, 1), slice(3))}
    (same,) = structure.check_batch_sizes("r", rows, bound=1e-5)
    assert same.status == "PASS"
    assert "batch 1 against 8" in same.reason
    rows[1]["logits"][2] += 1.0
    (off,) = structure.check_batch_sizes("r", rows, bound=1e-5)
    assert off.status == "FAIL"
    assert "1 of 3 images" in off.reason


def two_outputs(feeds: Feeds) -> Outputs:
    """Return the mean embedding of the tokens that the mask keeps, and the embedding of every token."""
    vectors = TABLE[feeds["ids"]] * feeds["mask"][:, :, None]
    return {"embedding": vectors.sum(axis=1) / feeds["mask"].sum(axis=1, keepdims=True), "tokens": vectors}


TABLE = np.random.default_rng(2).standard_normal((11, 6)).astype(np.float32)
TEXTS = {
    "ids": np.random.default_rng(3).integers(0, 11, (6, 5)),
    "mask": np.array([[1] * (1 + place % 5) + [0] * (4 - place % 5) for place in range(6)]),
}


def test_structural_tests_accept_integers_and_several_outputs() -> None:
    one = select_rows(TEXTS, slice(1))
    tests = [
        structure.check_batch_slots("r", two_outputs, one, batch=4, bound=1e-6),
        structure.check_permutation("r", two_outputs, TEXTS, bound=1e-6),
        *structure.check_output_values("r", two_outputs(TEXTS), noun="inputs"),
        *structure.check_batch_sizes("r", {6: two_outputs(TEXTS), 1: two_outputs(one)}, bound=1e-6),
    ]
    assert {each.status for each in tests} == {"PASS"}
    assert sum(each.test == "finite" for each in tests) == 2
    assert structure.check_extremes("r", two_outputs, TEXTS) == []


def test_worst_of_several_outputs_is_named() -> None:
    def stale(feeds: Feeds) -> Outputs:
        answers = {name: rows.copy() for name, rows in two_outputs(feeds).items()}
        answers["tokens"][-1] = answers["tokens"][0]
        return answers

    shuffled = structure.check_permutation("r", stale, TEXTS, bound=1e-6)
    assert shuffled.status == "FAIL"
    assert "(tokens)" in shuffled.reason
    assert "; inputs " in shuffled.reason
    finite = structure.check_output_values(
        "r", {**two_outputs(TEXTS), "tokens": np.full((6, 5, 6), np.nan)}, noun="inputs"
    )
    assert [(each.test, each.status) for each in finite][2] == ("finite", "FAIL")
    assert finite[2].reason == "tokens: NaN or Inf on 6 of 6 inputs"


def test_outputs_of_unexpected_size_in_a_batch_are_refused() -> None:
    """An example is a model that compares every input with every other one."""

    def against_each_other(images: Array) -> Array:
        rows = sound(images)
        product: Array = rows @ rows.T
        return product

    with pytest.raises(BadInput, match=r"r: gives logits \[8, 8\] .* gave \[8, 1\] in another batch"):
        structure.check_batch_sizes("r", {b: in_batches(against_each_other, b) for b in (1, 8)}, bound=1e-5)
