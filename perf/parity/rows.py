"""PURE: errors of a candidate's outputs on the reference's inputs, in float64. N inputs, F numbers of each."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.records import Figure
from perf.stats.decision import percent, wilson

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowErrors:
    """Errors and cosine of each input; if the candidate gives NaN or Inf, errors are infinite and the cosine is 0."""

    relative_error_N: Floats
    max_abs_N: Floats
    cosine_N: Floats
    finite_N: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPair:
    """Outputs of both sides in float64, with the candidate's non-finite rows set to zero."""

    reference_NF: Floats
    candidate_NF: Floats
    finite_N: Bools

    def errors(self) -> RowErrors:
        ref_NF, cand_NF = self.reference_NF, self.candidate_NF
        delta_NF = cand_NF - ref_NF
        ref_norm_N = np.linalg.norm(ref_NF, axis=1)
        norms_N = ref_norm_N * np.linalg.norm(cand_NF, axis=1)
        cosine_N = safe_ratios((ref_NF * cand_NF).sum(axis=1), norms_N, at_zero=1.0)
        return RowErrors(
            relative_error_N=self.filled_where_nonfinite(
                safe_ratios(np.linalg.norm(delta_NF, axis=1), ref_norm_N), np.inf
            ),
            max_abs_N=self.filled_where_nonfinite(np.abs(delta_NF).max(axis=1), np.inf),
            cosine_N=self.filled_where_nonfinite(cosine_N, 0.0),
            finite_N=self.finite_N,
        )

    def relative_error(self) -> float:
        """Return ||candidate - reference||_F / ||reference||_F over all inputs."""
        if not self.finite_N.all():
            return np.inf
        return safe_ratio(np.linalg.norm(self.candidate_NF - self.reference_NF), np.linalg.norm(self.reference_NF))

    def figures(self) -> dict[str, Any]:
        """Return the fields of CommonMeasures by name."""
        errors, finite_N = self.errors(), self.finite_N
        sides = self.candidate_NF[finite_N], self.reference_NF[finite_N]
        own, theirs = (float(np.linalg.norm(rows - rows.mean(axis=0))) if len(rows) > 1 else 1.0 for rows in sides)
        return {
            "images": len(finite_N),
            "nonfinite_images": int((~finite_N).sum()),
            "relative_error": self.relative_error(),
            "max_abs": float(errors.max_abs_N.max()),
            "cosine_mean": float(errors.cosine_N.mean()),
            "cosine_min": float(errors.cosine_N.min()),
            "spread_ratio": safe_ratio(own, theirs, 1.0),
        }

    def filled_where_nonfinite(self, values_N: Floats, worst: float) -> Floats:
        return np.where(self.finite_N, values_N, worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputKind:
    """A kind of output: its name, shape and rank (None for any), and the nouns of its inputs in messages."""

    name: str
    shape: str
    rank: int | None
    hint: str
    inputs: str = "inputs"
    values: str = "input values"

    def rows(self, reference: NDArray[np.floating], candidate: NDArray[np.floating]) -> RowPair:
        """Return both sides as rows. Raises BadInput as `refuse_misfit` does."""
        self.refuse_misfit(reference, candidate)
        ref_NF, cand_NF = (side.reshape(len(side), -1) for side in (reference, candidate))
        finite_N = np.isfinite(cand_NF).all(axis=1)
        return RowPair(
            reference_NF=ref_NF.astype(np.float64),
            candidate_NF=np.where(finite_N[:, None], cand_NF, 0).astype(np.float64),
            finite_N=finite_N,
        )

    def refuse_misfit(self, reference: NDArray[np.floating], candidate: NDArray[np.floating]) -> None:
        """Raise BadInput for differing shapes, another rank, no input, or a reference that is not finite."""
        # One number for each input, [N], counts as [N, 1].
        rank = max(2, reference.ndim)
        is_wrong_rank = reference.ndim < 1 or self.rank not in (None, rank)
        if is_wrong_rank and reference.shape == candidate.shape and reference.ndim > 2 and self.rank == 2:
            raise BadInput(
                f"{self.name}: got {reference.shape} of both, expected {self.shape}; outputs with a vector for each "
                "token aren't compared here: give models whose output is pooled"
            )
        if is_wrong_rank or reference.shape != candidate.shape or reference.size == 0:
            raise BadInput(
                f"{self.name}: got reference {reference.shape} and candidate {candidate.shape}, expected the same "
                f"{self.shape} for both; {self.hint}"
            )
        nonfinite = sum(not np.isfinite(row).all() for row in reference)
        if nonfinite:
            raise BadInput(
                f"{self.name}: the reference gives NaN or Inf on {nonfinite} of {len(reference)} {self.inputs}, so "
                f"nothing can be compared with it; look for (a) bad {self.values}, (b) weights that don't fit the model"
            )


class AnyMeasures:
    """Measures of any role.

    `share` is the field with the share of agreement, whose bounds are in fields of the same prefix. `agreement_name` is
    its name in sentences.
    """

    __slots__ = ()
    output_kind: ClassVar[OutputKind]
    share: ClassVar[str]
    agreement_name: ClassVar[str]

    @property
    def inputs(self) -> str:
        return self.output_kind.inputs

    @property
    def agreement(self) -> float | None:
        agreeing: float | None = getattr(self, self.share)
        return agreeing

    @property
    def agreement_bounds(self) -> tuple[float, float] | None:
        low, high = (getattr(self, f"{self.share}_{end}") for end in ("low", "high"))
        return None if low is None else (low, high)

    @property
    def agreement_line(self) -> str:
        assert self.agreement is not None, self
        return f"{self.agreement_name} {percent(self.agreement)}"

    @property
    def overlap(self) -> float | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonMeasures(AnyMeasures):
    """Measures of every role; relative_error is ||candidate - reference||_F / ||reference||_F, or infinite.

    spread_ratio is the variation of finite outputs over inputs relative to the reference's, 0 for a constant output.
    """

    images: int
    relative_error: Figure
    max_abs: Figure
    cosine_mean: Figure
    cosine_min: Figure
    nonfinite_images: int
    spread_ratio: Figure


class WithoutMargins(CommonMeasures):
    """Measures of outputs without margins, so that no flip is decisive."""

    __slots__ = ()

    @property
    def decisive_flips(self) -> int:
        return 0


def safe_ratios(top_N: Floats, bottom_N: Floats, at_zero: float = 0.0) -> Floats:
    """Return top / bottom; for a zero bottom `at_zero` if the top is zero too, else infinity."""
    safe_N = np.where(bottom_N > 0, bottom_N, 1.0)
    return np.where(bottom_N > 0, top_N / safe_N, np.where(top_N == 0, at_zero, np.inf))


def safe_ratio(top: float | np.floating, bottom: float | np.floating, at_zero: float = 0.0) -> float:
    return float(safe_ratios(np.asarray([float(top)]), np.asarray([float(bottom)]), at_zero)[0])


def bounded_share(name: str, share: float | None, inputs: int) -> dict[str, Any]:
    low, high = (None, None) if share is None else wilson(min(share, 1.0) * inputs, inputs)
    return {name: share, f"{name}_low": low, f"{name}_high": high}
