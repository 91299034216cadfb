"""The inputs that a model was fitted to, by its lineage, and how many of them judge it. Comparing imports torch."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from calib.fingerprints_text import FingerprintsText
from ground.records import record_from_value
from perf.record.runs import FittedInputs

from .model_config import FITTED

if TYPE_CHECKING:
    from calib.fingerprints import Fingerprints


def fitted_of_lineage(lineage: Mapping[str, Any], *, where: str) -> FingerprintsText | None:
    """What the model was fitted to; None where nothing tells. Raises BadInput for what can't be read."""
    if FITTED not in lineage:
        return None
    text = record_from_value(lineage[FITTED], FingerprintsText, where=f"{where}: lineage.{FITTED}")
    _ = text.arrays
    return text


def ids_of_lineage(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """The same entry as a graph carries it, which goes further than its model: digests, not what images look like."""
    return {FITTED: {"ids": lineage[FITTED]["ids"]}} if FITTED in lineage else {}


def fitted_inputs(
    judging: "Fingerprints | None", fitted: "Iterable[Fingerprints | FingerprintsText | None]", *, noun: str
) -> FittedInputs | None:
    """Count the judging inputs that are among the fitted ones; None where either is unknown."""
    if judging is None:
        return None
    decoded = [each.fingerprints if isinstance(each, FingerprintsText) else each for each in fitted]
    known = [each for each in decoded if each is not None and len(each)]
    if not known:
        return None
    from calib.fingerprints import Fingerprints

    same, alike = judging.overlap(Fingerprints.concatenated(known))
    return FittedInputs(judging=len(judging), same=same, alike=alike, noun=noun)
