"""PURE: bounds on the errors of links, with their rules, and verdicts on measures."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.precision import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8, FloatType
from ground.quantity import CONFIDENCE
from ground.records import Figure
from perf.stats.decision import percent_limit, share_against
from perf.stats.stats import DEFAULT_CONFIDENCE

from .measures import Measures
from .rows import Bools, Floats

# A similarity of unit vectors with errors e errs by up to 2 e, and so does the one that it is compared with.
SPREAD = 4.0
MOST_APART = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """Counts of inputs whose merged tokens depend on rounding.

    `tied` inputs have a margin of at most `margin`; on `apart` ones other tokens were merged.
    """

    inputs: int
    tied: int
    apart: int
    margin: Figure
    limit: Figure
    worst: Figure

    @property
    def share(self) -> float:
        return self.apart / self.inputs

    @property
    def holds(self) -> bool:
        return self.share <= self.limit

    def line(self, noun: str) -> str:
        if not self.apart:
            return ""
        sentence = (
            f"other tokens were merged on {self.apart} of {self.inputs} {noun} ({self.share:.1%}), whose similarities "
        )
        sentence += f"are equal up to {self.margin:.1g}; they err by up to {self.worst:.2g} and are judged apart"
        return sentence if self.holds else f"{sentence}: more than {self.limit:.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The smallest margin [N] of each input's merges, and the largest share of inputs that may merge other tokens."""

    margins_N: Floats
    limit: float = MOST_APART

    def split_ties(self, errors_N: Floats, bound: float) -> tuple[Bools, Ties]:
        """Return the mask of inputs with a tie and an error above the bound (other merges by rounding), and Ties."""
        margin = SPREAD * bound
        tied_N = self.margins_N[: len(errors_N)] <= margin
        apart_N: NDArray[np.bool_] = tied_N & (errors_N > bound) & np.isfinite(errors_N)
        worst = float(errors_N[apart_N].max()) if apart_N.any() else 0.0
        ties = Ties(
            inputs=len(errors_N),
            tied=int(tied_N.sum()),
            apart=int(apart_N.sum()),
            margin=margin,
            limit=self.limit,
            worst=worst,
        )
        return apart_N, ties

    def stable_inputs(self, bound: float) -> NDArray[np.int64]:
        """Return the indices of inputs whose merges don't depend on rounding."""
        return np.flatnonzero(self.margins_N > SPREAD * bound)


EXACT_FACTOR = 10
# A larger error is no rounding, however large the dense model's own error in that type is. BF16's unit roundoff is
# eight times FP16's, and whole encoders err by 0.004 to 0.016 in it; four times that must be allowed.
CEILINGS = {FLOAT16: 0.05, BFLOAT16: 0.2, INT8: 0.5, FLOAT8: 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Bounds on one link, None for no bound; flips on margins up to margin_noise (in logits) count as noise.

    `confidence` is that of an agreement's interval, 0 if the point decides. `elsewhere` names the inputs on which
    an undecided agreement is judged instead. An `excluded` output is only measured.
    """

    rule: str
    max_relative_error: float | None = None
    min_agreement: float | None = None
    max_decisive_flips: int | None = None
    margin_noise: float = 0.0
    min_iou: float | None = None
    confidence: float = 0.0
    elsewhere: str = ""
    excluded: bool = False

    def __post_init__(self) -> None:
        if self.max_relative_error is not None and not 0 <= self.max_relative_error < math.inf:
            raise BadInput(
                f"max error: got {self.max_relative_error}, expected a relative error of 0 or more, such as 0.05"
            )
        for name, least, such in (("agreement", self.min_agreement, 0.99), ("IoU", self.min_iou, 0.9)):
            if least is not None and not 0 <= least <= 1:
                raise BadInput(f"min {name}: got {least}, expected a share in [0, 1], such as {such}")
        if not CONFIDENCE.holds(self.confidence):
            raise BadInput(f"confidence: got {self.confidence}, expected {CONFIDENCE}, such as 0.95; 0 for the point")
        if not 0 <= self.margin_noise < math.inf:
            raise BadInput(f"margin noise: got {self.margin_noise}, expected a finite number of 0 or more")

    @property
    def bounds(self) -> bool:
        every = self.max_relative_error, self.min_agreement, self.max_decisive_flips, self.min_iou
        return any(bound is not None for bound in every)


def exact_tolerance(*, products: int, largest_logit: float, magnified: float = 1.0) -> Tolerance:
    """Bound a link of equal float32 computations by 10 unit roundoffs for each matrix product in sequence.

    A transformer's block has six products. `largest_logit` converts the bound to a margin; `magnified` is a head's
    factor on errors.
    """
    assert products > 0, products
    assert largest_logit >= 0, largest_logit
    assert magnified >= 1, magnified
    bound = EXACT_FACTOR * FLOAT32.unit_roundoff * products * magnified
    head = f" x {magnified:.2g}, as the head magnifies errors" if magnified > 1 else ""
    return Tolerance(
        rule=f"float32: {EXACT_FACTOR} x 2^-24 x {products} products in a row{head}",
        max_relative_error=bound,
        max_decisive_flips=0,
        margin_noise=2 * bound * largest_logit,
    )


def half_tolerance(
    noise: Measures, *, float_type: FloatType = FLOAT16, factor: float = 4.0, whose: str = "the dense model"
) -> Tolerance:
    """Bound a 16-bit link by `factor` times a model's own error in that type, usually the dense model's.

    The bound is at least the type's unit roundoff and at most its ceiling in CEILINGS: the error of a model that fails
    in that type is no measure of rounding.
    """
    if not factor >= 1:
        raise BadInput(
            f"half factor: got {factor}, expected 1 or more (the multiple of the dense model's own {float_type.label} "
            "error)"
        )
    ceiling, own = CEILINGS[float_type], f"{whose}'s own {float_type.label} error {noise.relative_error:.2g}"
    calibrated = factor * noise.relative_error
    bound = min(max(calibrated, float_type.unit_roundoff), ceiling)
    rule = f"{factor:g} x {own}"
    if calibrated < float_type.unit_roundoff:
        rule += f", at least 2^{math.log2(float_type.unit_roundoff):.0f}"
    if calibrated > ceiling:
        rule = f"at most {ceiling}: {own} is no yardstick"
    usable = 0 < calibrated <= ceiling
    return Tolerance(
        rule=rule,
        max_relative_error=bound,
        max_decisive_flips=0,
        margin_noise=2 * noise.max_abs * bound / noise.relative_error if usable else 0.0,
    )


def user_tolerance(
    *,
    min_agreement: float | None = None,
    max_error: float | None = None,
    min_iou: float | None = None,
    confidence: float = DEFAULT_CONFIDENCE,
    noise: Measures | None = None,
    elsewhere: str = "",
) -> Tolerance:
    """Return the user's limits for the reduced and the whole link; `noise`, dense FP16 errors, sets margin_noise."""
    tie = 2 * noise.max_abs if noise is not None and math.isfinite(noise.max_abs) else 0.0
    return Tolerance(
        rule="no limit was set" if min_agreement is max_error is min_iou is None else "the limit that was set",
        max_relative_error=max_error,
        min_agreement=min_agreement,
        margin_noise=tie,
        min_iou=min_iou,
        confidence=0.0 if min_agreement is None else confidence,
        elsewhere="" if min_agreement is None else elsewhere,
    )


EXCLUDED = Tolerance(rule="excluded by name", excluded=True)

# Outputs count as constant below this share of the reference's variation over images.
CONSTANT_SPREAD = 0.01

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "UNJUDGED"]


def judge_measures(errors: Measures, tolerance: Tolerance) -> tuple[Verdict, str]:
    bound, error = tolerance.max_relative_error, f"relative error {errors.relative_error:.2g}"
    if tolerance.excluded:
        return "UNJUDGED", f"{error}, {errors.agreement_line}; excluded by name"
    if errors.nonfinite_images:
        return "FAIL", f"NaN or Inf on {errors.nonfinite_images} of {errors.images} {errors.inputs}"
    if errors.spread_ratio < CONSTANT_SPREAD:
        one = errors.inputs.removesuffix("s")
        return "FAIL", f"the outputs hardly depend on the {one} (spread {errors.spread_ratio:.1g} of the reference's)"
    if bound is not None and errors.relative_error > bound:
        return "FAIL", f"{error} over {bound:.2g} ({tolerance.rule})"
    agreed, agreement = _judge_agreement(errors, tolerance)
    if agreed == "FAIL":
        return "FAIL", f"{agreement} ({errors.disagreement_line})"
    if tolerance.min_iou is not None and (errors.overlap is None or errors.overlap < tolerance.min_iou):
        return "FAIL", f"{errors.agreement_line}; an IoU of {tolerance.min_iou:g} at least was wanted"
    if tolerance.max_decisive_flips is not None and errors.decisive_flips > tolerance.max_decisive_flips:
        return (
            "FAIL",
            f"{errors.decisive_flips} top-1 flips on {errors.inputs} whose margin exceeds {tolerance.margin_noise:.2g}",
        )
    if agreed == "INCONCLUSIVE":
        return "INCONCLUSIVE", agreement
    if not tolerance.bounds:
        return "UNJUDGED", f"{error}, {errors.agreement_line}; no limit was set"
    if agreed == "UNJUDGED" and not replace(tolerance, min_agreement=None).bounds:
        return "UNJUDGED", f"{error}, {agreement}"
    met = [f"{error} within {bound:.2g}"] if bound is not None else []
    met += [agreement] if agreement else []
    met += [f"IoU {errors.overlap:.4f}, at least {tolerance.min_iou:g} wanted"] if tolerance.min_iou is not None else []
    return "PASS", ", ".join(met) or f"{errors.decisive_flips} decisive flips"


def _judge_agreement(errors: Measures, tolerance: Tolerance) -> tuple[Verdict, str]:
    """Return the agreement's verdict and sentence, empty without a limit; UNJUDGED if other inputs decide it."""
    least = tolerance.min_agreement
    if least is None:
        return "PASS", ""
    limit = percent_limit(least)
    if errors.agreement is None:
        return "INCONCLUSIVE", f"{errors.agreement_line}: there is no agreement to hold to the limit, {limit}"
    decision, sentence = share_against(
        errors.agreement, least, count=errors.images, noun=errors.inputs, confidence=tolerance.confidence
    )
    if decision == "INCONCLUSIVE" and tolerance.elsewhere:
        return "UNJUDGED", f"{errors.agreement_name} {sentence}; it is judged on {tolerance.elsewhere}"
    return decision, f"{errors.agreement_name} {sentence}"


def note_ties(status_and_reason: tuple[Verdict, str], ties: Ties | None, noun: str) -> tuple[Verdict, str]:
    """Return a verdict with a note on inputs with ties, FAIL if there are too many."""
    status, reason = status_and_reason
    if ties is None or not ties.apart:
        return status_and_reason
    return (status if ties.holds else "FAIL"), f"{reason}; {ties.line(noun)}"
