"""Links of the parity chain: comparisons of two forms of a model on the same inputs, at one output."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.ports import LOGITS, OutputPort, Role
from ground.records import Figure, json_from_record

from .measures import Measures, measure_outputs, measure_relative_errors, require_agreement
from .tolerance import Choices, Ties, Tolerance, Verdict, judge_measures, note_ties

LinkKind = Literal["exact", "half", "quantised", "reduced", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A link's errors at one batch size; `images` is the number of images, None for all."""

    batch: int
    relative_error: Figure
    max_abs: Figure
    top1_agreement: float | None = None
    images: int | None = None
    agreement: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of the chain at one output; `measures` and `ties` are those of the worst batch size."""

    name: str
    kind: LinkKind
    reference: str
    candidate: str
    status: Verdict
    reason: str
    batch: int
    measures: Measures
    batches: tuple[BatchRow, ...]
    tolerance: Tolerance
    role: Role = "logits"
    output: str | None = None
    ties: Ties | None = None

    @property
    def apart(self) -> int:
        return 0 if self.ties is None else self.ties.apart


def json_from_link(link: Link) -> dict[str, Any]:
    """Return a link as JSON, without the fields that its role and its limits don't use."""
    row: dict[str, Any] = json_from_record(link)
    left_out = {"output": link.output is None, "ties": link.ties is None, "role": link.role == "logits"}
    left_out_of_limits = {
        "min_iou": link.role != "score map",
        "confidence": link.tolerance.min_agreement is None,
        "elsewhere": not link.tolerance.elsewhere,
        "excluded": not link.tolerance.excluded,
    }
    limits = {key: value for key, value in row["tolerance"].items() if not left_out_of_limits.get(key)}
    for batch in row["batches"]:
        del batch["agreement" if link.role == "logits" else "top1_agreement"]
    return {key: value for key, value in row.items() if not left_out.get(key)} | {"tolerance": limits}


def measure_link(
    *,
    name: str,
    kind: LinkKind,
    reference: str,
    candidate: str,
    reference_rows: NDArray[np.floating],
    candidate_by_batch: Mapping[int, NDArray[np.floating]],
    tolerance: Tolerance,
    port: OutputPort = LOGITS,
    several: bool = False,
    choices: Choices | None = None,
    threshold: float | None = None,
) -> Link:
    """Measure and judge one link at one output; with `several` outputs the link's name contains this one.

    `reference_rows` are outputs [N, ...], `candidate_by_batch` those of all N inputs or of the first ones, by batch
    size. A user's limits hold over all images, so a batch size with only some of them is judged only by bounds of
    rounding. Inputs on which rounding alone changes the `choices` of token merging are judged apart. `threshold` is
    that of a single logit or a one-class score map. Raises BadInput if shapes differ, the reference is not finite, or a
    limited agreement is not defined.
    """
    images = len(reference_rows)
    if tolerance.min_agreement is not None:
        require_agreement(port, images)
    full_batches = {batch: rows for batch, rows in candidate_by_batch.items() if len(rows) == images}
    assert full_batches, (name, images)
    ties: dict[int, Ties] = {}
    at: dict[int, Measures] = {}
    for batch, rows in sorted(candidate_by_batch.items()):
        if rows.shape[1:] != reference_rows.shape[1:]:
            raise BadInput(
                f"{candidate}: gives {port.name} {list(rows.shape)} where {reference} gives "
                f"{[len(rows), *reference_rows.shape[1:]]}, expected the same sizes; export it from the same model"
            )
        expected = reference_rows[: len(rows)]
        if choices is not None and tolerance.max_relative_error is not None:
            errors_N = measure_relative_errors(expected, rows, role=port.role)
            apart_N, ties[batch] = choices.split_ties(errors_N, tolerance.max_relative_error)
            if not apart_N.all():
                expected, rows = expected[~apart_N], rows[~apart_N]
        at[batch] = measure_outputs(
            expected, rows, role=port.role, margin_noise=tolerance.margin_noise, threshold=threshold
        )
    unlimited = replace(tolerance, max_relative_error=None, min_agreement=None, min_iou=None)
    of_some = tolerance if kind in ("exact", "half", "quantised") else unlimited
    judged = {
        batch: note_ties(judge_measures(errors, tolerance), ties.get(batch), errors.inputs)
        if batch in full_batches
        else judge_measures(errors, of_some)
        for batch, errors in at.items()
    }
    failing, undecided = (
        [batch for batch, (status, _) in judged.items() if status == unmet] for unmet in ("FAIL", "INCONCLUSIVE")
    )
    if undecided and not failing:
        worst = min(undecided, key=lambda batch: (at[batch].agreement or 0.0, -at[batch].relative_error))
    else:
        worst = max(failing or full_batches, key=lambda batch: at[batch].relative_error)
    status, reason = judged[worst]
    return Link(
        name=f"{name} {port.name}" if several else name,
        kind=kind,
        reference=reference,
        candidate=candidate,
        status=status,
        reason=reason + (f" (at batch {worst})" if len(at) > 1 else ""),
        batch=worst,
        measures=at[worst],
        batches=tuple(
            BatchRow(
                batch=size,
                relative_error=errors.relative_error,
                max_abs=errors.max_abs,
                top1_agreement=errors.agreement if port.role == "logits" else None,
                agreement=None if port.role == "logits" else errors.agreement,
                images=None if size in full_batches else len(candidate_by_batch[size]),
            )
            for size, errors in at.items()
        ),
        tolerance=tolerance,
        role=port.role,
        output=port.name if several else None,
        ties=ties.get(worst),
    )
