"""Fingerprints of a model's fitted inputs, and counts of judging inputs among them; only counting imports torch."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from calib.fingerprints_text import FingerprintsText
from ground.records import record_from_value
from perf.record.runs import FittedInputs

from .model_config import FITTED

if TYPE_CHECKING:
    from calib.fingerprints import Fingerprints


def fitted_of_lineage(lineage: Mapping[str, Any], *, where: str) -> FingerprintsText | None:
    """Return the fingerprints of a model's fitted inputs, None without any. Raises BadInput for an invalid entry."""
    if FITTED not in lineage:
        return None
    text = record_from_value(lineage[FITTED], FingerprintsText, where=f"{where}: lineage.{FITTED}")
    _ = text.arrays
    return text


def ids_of_lineage(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry FITTED of a lineage with its digests alone, which show nothing of images; {} without it."""
    return {FITTED: {"ids": lineage[FITTED]["ids"]}} if FITTED in lineage else {}


def fitted_inputs(
    judging: "Fingerprints | None", fitted: "Iterable[Fingerprints | FingerprintsText | None]", *, noun: str
) -> FittedInputs | None:
    """Return the counts of judging inputs: all, same as and like fitted ones; None where either are unknown."""
    if judging is None:
        return None
    decoded = [each.fingerprints if isinstance(each, FingerprintsText) else each for each in fitted]
    known = [each for each in decoded if each is not None and len(each)]
    if not known:
        return None
    from calib.fingerprints import Fingerprints

    same, alike = judging.overlap(Fingerprints.concatenated(known))
    return FittedInputs(judging=len(judging), same=same, alike=alike, noun=noun)
