"""Structural tests: what must hold whatever the weights are: batch slots, order, batch size, sane outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ground.records import Figure

Array = NDArray[np.float32]
Run = Callable[[Array], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTest:
    """The outcome of one structural test. NOTED is information and fails nothing."""

    candidate: str
    test: str
    status: Literal["PASS", "FAIL", "NOTED"]
    value: Figure
    bound: Figure
    reason: str


def batch_slot(candidate: str, run: Run, image_1CHW: Array, *, batch: int, bound: float) -> StructuralTest:
    """One image in every slot of a batch gives one answer: no slot is off the median by over `bound` (relative)."""
    rows_BC = run(np.repeat(image_1CHW, batch, axis=0))
    off_B = _deviation(rows_BC, np.broadcast_to(np.median(rows_BC, axis=0), rows_BC.shape))
    bad = [slot for slot, off in enumerate(off_B) if not off <= bound]
    reason = f"one image in all {batch} slots: the answers differ by {off_B.max():.2g}, {bound:.2g} allowed"
    if bad:
        reason += f"; slots {_some(bad)} differ from the median slot"
    return _finding(candidate, "batch-slot", off_B.max(), bound, reason)


def permutation(
    candidate: str, run: Run, images_NCHW: Array, *, bound: float, straight_NC: Array | None = None, seed: int = 0
) -> StructuralTest:
    """Shuffling a batch shuffles its answers and changes none. `straight_NC`: the unshuffled answers, where known."""
    order_N = np.random.default_rng(seed).permutation(len(images_NCHW))
    straight_NC = run(images_NCHW) if straight_NC is None else straight_NC
    off_N = _deviation(run(images_NCHW[order_N]), straight_NC[order_N])
    bad = [int(order_N[place]) for place, off in enumerate(off_N) if not off <= bound]
    reason = f"a shuffled batch of {len(images_NCHW)}: the answers differ by {off_N.max():.2g}, {bound:.2g} allowed"
    return _finding(
        candidate, "permutation", off_N.max(), bound, reason + (f"; images {_some(sorted(bad))}" if bad else "")
    )


def batch_sizes(
    candidate: str, logits_by_batch: Mapping[int, NDArray[np.floating]], *, bound: float
) -> list[StructuralTest]:
    """Each image's answer is the same at every batch size as at the one that ran most images (the smallest such).

    A size may have run the first few of the images only.
    """
    first = min(logits_by_batch, key=lambda batch: (-len(logits_by_batch[batch]), batch))
    found = []
    for batch in sorted(logits_by_batch.keys() - {first}):
        rows_NC = logits_by_batch[batch]
        off_N = _deviation(rows_NC, logits_by_batch[first][: len(rows_NC)])
        bad = int((~(off_N <= bound)).sum())
        reason = f"batch {batch} against {first}: the answers differ by {off_N.max():.2g}, {bound:.2g} allowed"
        reason += f"; {bad} of {len(off_N)} images" if bad else ""
        found.append(_finding(candidate, "batch-size", off_N.max(), bound, reason))
    return found


def outputs(candidate: str, logits_NC: NDArray[np.floating]) -> list[StructuralTest]:
    """No NaN or Inf, and outputs that depend on the image (their variation over images is no mere rounding)."""
    spoilt_N = ~np.isfinite(logits_NC).all(axis=1)
    spoilt = int(spoilt_N.sum())
    reason = f"NaN or Inf on {spoilt} of {len(logits_NC)} images"
    found = [_finding(candidate, "finite", spoilt, 0, reason)]
    sound_NC = logits_NC[~spoilt_N].astype(np.float64)
    if len(sound_NC) > 1:
        share = _spread(sound_NC)
        reason = f"over the images the logits vary by {share:.2g} of their size, at least 0.001 wanted"
        found.append(
            StructuralTest(
                candidate=candidate,
                test="constant",
                status="PASS" if share > 1e-3 else "FAIL",
                value=share,
                bound=1e-3,
                reason=reason,
            )
        )
    return found


def timed_run(
    candidate: str, timed_NC: NDArray[np.floating], verified_NC: NDArray[np.floating], *, bound: float
) -> StructuralTest:
    """Outputs sampled inside a timed run equal those that were verified on the same images."""
    off = float(_deviation(timed_NC, verified_NC).max())
    reason = (
        f"{len(timed_NC)} answers taken inside the timed run differ by {off:.2g} from the verified, {bound:.2g} allowed"
    )
    return _finding(candidate, "timed-run", off, bound, reason)


def calibrated_range(candidate: str, images_NCHW: Array, *, low: float, high: float) -> StructuralTest:
    """The share of images with pixels outside the range seen in calibration. Noted, not failed: it is the data."""
    outside_N = np.asarray([bool((image.min() < low) or (image.max() > high)) for image in images_NCHW])
    share = float(outside_N.mean())
    reason = f"{outside_N.sum()} of {len(images_NCHW)} images leave the calibrated range [{low:.3g}, {high:.3g}]"
    return StructuralTest(
        candidate=candidate,
        test="calibrated-range",
        status="NOTED" if share else "PASS",
        value=share,
        bound=0.0,
        reason=reason,
    )


def extremes(candidate: str, run: Run, images_NCHW: Array, *, factor: float = 4.0) -> StructuralTest:
    """Images pushed outside the calibrated range (all values times `factor`) still give finite answers."""
    spoilt = int((~np.isfinite(run(images_NCHW * np.float32(factor))).all(axis=1)).sum())
    reason = f"NaN or Inf on {spoilt} of {len(images_NCHW)} images with all values times {factor:g}"
    return _finding(candidate, "extremes", spoilt, 0, reason)


def _deviation(rows_NC: NDArray[np.floating], expected_NC: NDArray[np.floating]) -> NDArray[np.float64]:
    """Relative distance of each row from the expected one; inf where either is not finite."""
    assert rows_NC.shape == expected_NC.shape, (rows_NC.shape, expected_NC.shape)
    finite_N = np.isfinite(rows_NC).all(axis=1) & np.isfinite(expected_NC).all(axis=1)
    rows, expected = (np.where(finite_N[:, None], x, 0).astype(np.float64) for x in (rows_NC, expected_NC))
    size_N = np.maximum(np.linalg.norm(expected, axis=1), np.finfo(np.float64).tiny)
    return np.where(finite_N, np.linalg.norm(rows - expected, axis=1) / size_N, np.inf)


def _spread(logits_NC: NDArray[np.float64]) -> float:
    size = float(np.linalg.norm(logits_NC))
    return float(np.linalg.norm(logits_NC - logits_NC.mean(axis=0))) / size if size else 0.0


def _finding(candidate: str, test: str, value: float, bound: float, reason: str) -> StructuralTest:
    return StructuralTest(
        candidate=candidate,
        test=test,
        status="PASS" if value <= bound else "FAIL",
        value=float(value),
        bound=float(bound),
        reason=reason,
    )


def _some(items: list[int]) -> str:
    return ", ".join(map(str, items[:8])) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
