"""A user's own measure of each artefact's outputs, such as a mean average precision: one number, and what made it."""

from dataclasses import dataclass

from ground.records import Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetric:
    """`model` is the label of the artefact whose outputs were measured, `sha256` covers the command, the files that
    it names and the labels.
    """

    name: str
    model: str
    value: float
    command: str
    sha256: Sha256
