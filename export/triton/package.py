"""What one version of one served model is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from export.engine.options import BatchProfile
from ground.errors import BadInput
from ground.text import printable

from .config import Serving
from .expected import Expected
from .versions import require_name


def require_labels(labels: Sequence[str], *, where: str) -> None:
    """Raise BadInput for names of classes that a server can't tell apart, or that can't be shown."""
    if len(set(labels)) < len(labels) or any(not text.strip() or "\n" in text for text in labels):
        raise BadInput(f"{where}: every label must be one line, not empty and unique")
    if unprintable := [text for text in labels if printable(text) != text]:
        raise BadInput(f"{where}: the label {unprintable[0][:100]!r} has characters that are no letters; remove them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What goes into a repository as one version of one model.

    `plans` are TensorRT plans with their records beside them, one per compute capability; `onnx` the graph they were
    built from, served by ONNX Runtime on the GPU; `cpu_onnx` the graph for the CPU. Any of them may be missing.
    `expected` goes by variant: plan, onnx, cpu. `server` names the release that will serve, such as 26.07.
    `profiles` are for the build script when there is no plan to take them from.
    """

    name: str
    version: int = 1
    plans: tuple[Path, ...] = ()
    onnx: Path | None = None
    cpu_onnx: Path | None = None
    labels: tuple[str, ...] = ()
    serving: Serving = field(default_factory=Serving)
    expected: Mapping[str, Expected] = field(default_factory=dict)
    profiles: tuple[BatchProfile, ...] = ()
    server: str | None = None

    def __post_init__(self) -> None:
        require_name(self.name)
        if self.version < 1:
            raise BadInput(f"the model version must be at least 1, got {self.version}")
        if not self.plans and self.onnx is None and self.cpu_onnx is None:
            raise BadInput(
                f"{self.name}: there is nothing to serve; give a plan, an ONNX file or an ONNX file for the CPU"
            )
        if self.profiles and (self.plans or self.onnx is None):
            raise BadInput(
                f"{self.name}: profiles are for the script that builds a plan from an ONNX file; "
                f"{'leave them out, the plan has its own' if self.plans else 'give that file, or leave them out'}"
            )
        unknown = set(self.expected) - {"plan", "onnx", "cpu"}
        if unknown:
            raise BadInput(f"expected figures go by plan, onnx and cpu, got {', '.join(sorted(unknown))}")
        require_labels(self.labels, where=self.name)
