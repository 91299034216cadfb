"""PURE: what a link's measures come to against its tolerance: a verdict, and the sentence that says why."""

from dataclasses import replace
from typing import Literal

from perf.stats.decision import percent_limit, share_against

from .measures import Measures
from .ties import Ties
from .tolerance import Tolerance

# Under this share of the reference's variation over images, outputs are called constant.
CONSTANT_SPREAD = 0.01

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "UNJUDGED"]


def judge(errors: Measures, tolerance: Tolerance) -> tuple[Verdict, str]:
    """Status and the sentence that says why. Outputs that are not finite or don't depend on the image fail any link."""
    bound, error = tolerance.max_relative_error, f"relative error {errors.relative_error:.2g}"
    if errors.nonfinite_images:
        return "FAIL", f"NaN or Inf on {errors.nonfinite_images} of {errors.images} {errors.inputs}"
    if errors.spread_ratio < CONSTANT_SPREAD:
        one = errors.inputs.removesuffix("s")
        return "FAIL", f"the outputs hardly depend on the {one} (spread {errors.spread_ratio:.1g} of the reference's)"
    if bound is not None and errors.relative_error > bound:
        return "FAIL", f"{error} over {bound:.2g} ({tolerance.rule})"
    agreed, agreement = _agreed(errors, tolerance)
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


def _agreed(errors: Measures, tolerance: Tolerance) -> tuple[Verdict, str]:
    """Whether the agreement keeps to its limit, in words; empty without a limit. Where there is no agreement nothing is
    decided, and what is open here is not judged where it is elsewhere.
    """
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


def with_ties(status_and_reason: tuple[Verdict, str], ties: Ties | None, noun: str) -> tuple[Verdict, str]:
    """A judgement with a note on the inputs whose ties were broken differently; too many of them fail the link.

    A share is one of all inputs: of the first few one may be a quarter.
    """
    status, reason = status_and_reason
    if ties is None or not ties.apart:
        return status_and_reason
    return (status if ties.holds else "FAIL"), f"{reason}; {ties.line(noun)}"
