"""Which inputs a model was fitted to: kept in its config.json and its graphs, and looked for among those that judge."""

from collections.abc import Iterable, Mapping
from typing import Any

from calib.fingerprints import Fingerprints, FingerprintsText
from ground.records import record_from_value
from perf.record.fitted import FittedInputs

from .model_config import FITTED


def fitted_of_lineage(lineage: Mapping[str, Any], *, where: str) -> Fingerprints | None:
    """What the model was fitted to; None where nothing tells. Raises BadInput for what can't be read."""
    if FITTED not in lineage:
        return None
    return record_from_value(lineage[FITTED], FingerprintsText, where=f"{where}: lineage.{FITTED}").fingerprints


def ids_of_lineage(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """The same entry as a graph carries it, which goes further than its model: digests alone, not what images look
    like.
    """
    return {FITTED: {"ids": lineage[FITTED]["ids"]}} if FITTED in lineage else {}


def fitted_inputs(
    judging: Fingerprints | None, fitted: Iterable[Fingerprints | None], *, noun: str
) -> FittedInputs | None:
    """How many of the judging inputs are among those; None where either is unknown."""
    fingerprints = [each for each in fitted if each is not None and len(each)]
    if judging is None or not fingerprints:
        return None
    same, alike = judging.overlap(Fingerprints.concatenated(fingerprints))
    return FittedInputs(judging=len(judging), same=same, alike=alike, noun=noun)
