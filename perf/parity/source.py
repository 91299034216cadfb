"""What a link's side was: the artefact, what built and runs it, and the graph it was made of."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`backend` and `version` are of the library that built an engine, or that ran a graph; `targets` GPUs it was built
    for (SM 86 is "86"); `graph_sha256` of the ONNX file that it was built of, or is.
    """

    label: str
    backend: str
    version: str
    targets: tuple[str, ...]
    precision: str
    graph_sha256: Sha256
    sha256: Sha256

    @property
    def line(self) -> str:
        """For people."""
        where = f" for SM {', '.join(self.targets)}" if self.targets else ""
        return f"{self.label}: {self.backend} {self.version}{where}, {self.precision}, graph {self.graph_sha256[:12]}"
