"""Which inputs a model was fitted to: kept in its config.json, and looked for among those that judge it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calib.fingerprints import Fingerprints, FingerprintsText
from ground.records import record_from_value
from perf.record.fitted import FittedInputs

from .hub_snapshot import config_of_directory, is_ours
from .model_config import CONFIG, FITTED, load_model_config


def fitted_of_lineage(lineage: Mapping[str, Any], *, where: str) -> Fingerprints | None:
    """What the model was fitted to; None where nothing tells. Raises BadInput for what can't be read."""
    if FITTED not in lineage:
        return None
    return record_from_value(lineage[FITTED], FingerprintsText, where=f"{where}: lineage.{FITTED}").fingerprints


def fitted_of_path(path: Path) -> Fingerprints | None:
    """The same of a model directory, or of a graph or an engine that lies in one; None for others."""
    directory = path if path.is_dir() else path.parent
    if not (directory / CONFIG).is_file() or not is_ours(config_of_directory(directory)):
        return None
    return fitted_of_lineage(load_model_config(directory).lineage, where=str(directory / CONFIG))


def fitted_inputs(
    judging: Fingerprints | None, fitted: Iterable[Fingerprints | None], *, noun: str
) -> FittedInputs | None:
    """How many of the judging inputs are among those; None where either is unknown."""
    known = [each for each in fitted if each is not None and len(each)]
    if judging is None or not known:
        return None
    same, alike = judging.seen_in(Fingerprints.joined(known))
    return FittedInputs(judging=len(judging), same=same, alike=alike, noun=noun)
