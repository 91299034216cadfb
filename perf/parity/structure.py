"""Structural tests of models: batch slots, order, batch sizes, and finite outputs that depend on the input.

A test covers all outputs and names the one with the largest error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, batch_size, input_noun, select_rows
from ground.records import Figure

Array = NDArray[np.floating]
Run = Callable[[Feeds], Outputs]
Status = Literal["PASS", "FAIL", "NOTED"]
FACTOR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTest:
    """The result of one structural test; NOTED is only information."""

    candidate: str
    test: str
    status: Status
    value: Figure
    bound: Figure
    reason: str


def check_batch_slots(candidate: str, run: Run, one: Feeds, *, batch: int, bound: float) -> StructuralTest:
    """Test that one input gives the same output in every slot of a batch."""
    answers = run({name: np.repeat(array, batch, axis=0) for name, array in one.items()})
    medians = {name: np.broadcast_to(np.median(rows, axis=0), rows.shape) for name, rows in answers.items()}
    off, noun = _compare_outputs(candidate, answers, medians), input_noun(one).removesuffix("s")
    deviating = off.over(bound)
    more = f"; slots {_join_some(deviating)} differ from the median slot" if deviating else ""
    return off.finding(candidate, "batch-slot", f"one {noun} in all {batch} slots", bound, more)


def check_permutation(
    candidate: str, run: Run, feeds: Feeds, *, bound: float, straight: Outputs | None = None
) -> StructuralTest:
    """Test that shuffling a batch only shuffles its outputs; `straight` has the unshuffled outputs, if known."""
    count = batch_size(feeds)
    order_N = np.random.default_rng(0).permutation(count)
    straight = run(feeds) if straight is None else straight
    off = _compare_outputs(candidate, run(select_rows(feeds, order_N)), select_rows(straight, order_N))
    deviating = sorted(int(order_N[place]) for place in off.over(bound))
    more = f"; {input_noun(feeds)} {_join_some(deviating)}" if deviating else ""
    return off.finding(candidate, "permutation", f"a shuffled batch of {count}", bound, more)


def check_batch_sizes(
    candidate: str, by_batch: Mapping[int, Outputs], *, bound: float, noun: str = "images"
) -> list[StructuralTest]:
    """Test that outputs at each batch size equal those at the batch size that ran the most inputs."""
    first = min(by_batch, key=lambda batch: (-batch_size(by_batch[batch]), batch))
    tests = []
    for batch in sorted(by_batch.keys() - {first}):
        count = batch_size(by_batch[batch])
        off = _compare_outputs(candidate, by_batch[batch], select_rows(by_batch[first], slice(count)))
        deviating = len(off.over(bound))
        more = f"; {deviating} of {count} {noun}" if deviating else ""
        tests.append(off.finding(candidate, "batch-size", f"batch {batch} against {first}", bound, more))
    return tests


def check_output_values(candidate: str, answers: Outputs, *, noun: str = "images") -> list[StructuralTest]:
    """Test that outputs are finite and depend on the input."""
    tests = []
    for name, rows in answers.items():
        finite_N = _finite(rows)
        nonfinite = int((~finite_N).sum())
        reason = f"{f'{name}: ' if len(answers) > 1 else ''}NaN or Inf on {nonfinite} of {len(rows)} {noun}"
        tests.append(judge_bound(candidate, "finite", nonfinite, 0, reason))
        sound_NF = rows.reshape(len(rows), -1)[finite_N].astype(np.float64)
        if len(sound_NF) > 1:
            size = float(np.linalg.norm(sound_NF))
            share = float(np.linalg.norm(sound_NF - sound_NF.mean(axis=0))) / size if size else 0.0
            status: Status = "PASS" if share > 1e-3 else "FAIL"
            reason = f"over the {noun} the {name} vary by {share:.2g} of their size, at least 0.001 wanted"
            tests.append(replace(judge_bound(candidate, "constant", share, 1e-3, reason), status=status))
    return tests


def check_timed_run(candidate: str, timed: Outputs, verified: Outputs, *, bound: float) -> StructuralTest:
    """Test that outputs of timed calls equal the verified outputs."""
    off = _compare_outputs(candidate, timed, verified)
    reason = (
        f"{batch_size(timed)} answers taken inside the timed run differ by {off.text} from the verified, "
        f"{bound:.2g} allowed"
    )
    return judge_bound(candidate, "timed-run", off.largest, bound, reason)


def check_calibrated_range(
    candidate: str, images_NCHW: NDArray[np.float32], *, low: float, high: float
) -> StructuralTest:
    """Return a test with the share of images that have values outside of [low, high]: NOTED if any has, never FAIL."""
    outside_N = np.asarray([bool((image.min() < low) or (image.max() > high)) for image in images_NCHW])
    share = float(outside_N.mean())
    reason = f"{outside_N.sum()} of {len(images_NCHW)} images leave the calibrated range [{low:.3g}, {high:.3g}]"
    return replace(judge_bound(candidate, "calibrated-range", share, 0.0, reason), status="NOTED" if share else "PASS")


def check_extremes(candidate: str, run: Run, feeds: Feeds) -> list[StructuralTest]:
    """Test that inputs times FACTOR give finite outputs; return no test without float inputs."""
    floats = {name for name, array in feeds.items() if np.issubdtype(array.dtype, np.floating)}
    if not floats:
        return []
    pushed = {name: array * array.dtype.type(FACTOR) if name in floats else array for name, array in feeds.items()}
    finite_N = np.logical_and.reduce([_finite(rows) for rows in run(pushed).values()])
    nonfinite = int((~finite_N).sum())
    reason = f"NaN or Inf on {nonfinite} of {len(finite_N)} {input_noun(feeds)} with all values times {FACTOR:g}"
    return [judge_bound(candidate, "extremes", nonfinite, 0, reason)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deviation:
    """Relative errors of rows [N], the largest over outputs, and the output with the largest error if several."""

    off_N: NDArray[np.float64]
    worst: str

    @property
    def largest(self) -> float:
        return float(self.off_N.max())

    @property
    def text(self) -> str:
        return f"{self.largest:.2g}" + (f" ({self.worst})" if self.worst else "")

    def over(self, bound: float) -> list[int]:
        return [place for place, off in enumerate(self.off_N) if not off <= bound]

    def finding(self, candidate: str, test: str, what: str, bound: float, more: str) -> StructuralTest:
        reason = f"{what}: the answers differ by {self.text}, {bound:.2g} allowed{more}"
        return judge_bound(candidate, test, self.largest, bound, reason)


def _compare_outputs(candidate: str, answers: Outputs, expected: Outputs) -> _Deviation:
    assert answers.keys() == expected.keys(), (list(answers), list(expected))
    for name, rows in answers.items():
        if rows.shape != expected[name].shape:
            raise BadInput(
                f"{candidate}: gives {name} {list(rows.shape)} to inputs to which it gave "
                f"{list(expected[name].shape)} in another batch, expected the same sizes in every batch; export the "
                "model with the batch in front of its outputs, and fixed sizes behind it"
            )
    by_output = {name: _row_errors(rows, expected[name]) for name, rows in answers.items()}
    worst = max(by_output, key=lambda name: by_output[name].max()) if len(by_output) > 1 else ""
    return _Deviation(off_N=np.maximum.reduce(list(by_output.values())), worst=worst)


def _row_errors(rows: Array, expected: Array) -> NDArray[np.float64]:
    finite_N = _finite(rows) & _finite(expected)
    rows_NF, expected_NF = (
        np.where(finite_N[:, None], side.reshape(len(side), -1), 0).astype(np.float64) for side in (rows, expected)
    )
    size_N = np.maximum(np.linalg.norm(expected_NF, axis=1), np.finfo(np.float64).tiny)
    return np.where(finite_N, np.linalg.norm(rows_NF - expected_NF, axis=1) / size_N, np.inf)


def _finite(rows: Array) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(rows).reshape(len(rows), -1).all(axis=1), dtype=np.bool_)


def judge_bound(candidate: str, test: str, value: float, bound: float, reason: str) -> StructuralTest:
    return StructuralTest(
        candidate=candidate,
        test=test,
        status="PASS" if value <= bound else "FAIL",
        value=float(value),
        bound=float(bound),
        reason=reason,
    )


def _join_some(items: list[int]) -> str:
    return ", ".join(map(str, items[:8])) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
