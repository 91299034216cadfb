"""The record that lies beside every engine: what it was made from, by what, and what it holds."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from export.graph.ports import GraphPort
from ground.errors import BadInput
from ground.ports import Role
from ground.records import record_from_text

from .options import BatchProfile

VERSION = 1
KIND = "engine"


def _require_count(name: str, value: int | None, least: int) -> None:
    if value is not None and not least <= value < 1 << 63:
        raise BadInput(f"{name} must be at least {least}, got {value!s:.100}")


def _require_ports(name: str, ports: tuple[GraphPort, ...]) -> None:
    if not ports:
        raise BadInput(f"{name}: none are named")
    for port in ports:
        sizes = [size for size in port.shape if isinstance(size, int)]
        if not port.shape or any(not 1 <= size < 1 << 63 for size in sizes):
            raise BadInput(f"{name}: {port.name[:100]!r} must have sizes of at least 1, got {str(port.shape)[:100]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """Sizes in bytes, time in seconds, shares in [0, 1]; None where the backend does not say.

    `roles` holds what outputs are for that are not logits, by their names.
    `precision` is what the weights are (fp32, fp16, mixed), not what somebody calls them. `kernels` and `kernel_kinds`
    count over all profiles; with several TensorRT-RTX targets in one plan the builder lists one of them.
    """

    backend: str
    library_version: str
    command: str
    onnx_sha256: str
    onnx_bytes: int
    plan_sha256: str
    plan_bytes: int
    precision: str
    half_weight_share: float
    half_kernel_share: float | None
    targets: tuple[str, ...]
    gpu: str | None
    profiles: tuple[str, ...]
    inputs: tuple[GraphPort, ...]
    outputs: tuple[GraphPort, ...]
    kernels: int | None
    kernel_kinds: Mapping[str, int]
    attention_sites: tuple[str, ...]
    fused_attention_sites: tuple[str, ...] | None
    build_seconds: float
    options: Mapping[str, str | int | float | bool]
    roles: Mapping[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("onnx_sha256", "plan_sha256"):
            if not re.fullmatch("[0-9a-f]{64}", getattr(self, name)):
                raise BadInput(f"{name} must have 64 hex digits, got {getattr(self, name)[:100]!r}")
        for name, least in (("onnx_bytes", 1), ("plan_bytes", 1), ("kernels", 0)):
            _require_count(name, getattr(self, name), least)
        for kind, count in self.kernel_kinds.items():
            _require_count(f"kernel_kinds: {kind[:100]!r}", count, 0)
        for name in ("half_weight_share", "half_kernel_share"):
            share = getattr(self, name)
            if share is not None and not 0.0 <= share <= 1.0:
                raise BadInput(f"{name} must lie in [0, 1], got {share}")
        if not 0.0 <= self.build_seconds < math.inf:
            raise BadInput(f"build_seconds must be at least 0 and finite, got {self.build_seconds}")
        for profile in self.profiles:
            BatchProfile.from_text(profile)
        _require_ports("inputs", self.inputs)
        _require_ports("outputs", self.outputs)

    @property
    def fused_attention(self) -> int | None:
        """How many attention sites run as one fused kernel."""
        return None if self.fused_attention_sites is None else len(self.fused_attention_sites)

    def to_json(self) -> str:
        """The record as it is written beside the plan."""
        content = {"version": VERSION, "kind": KIND, **asdict(self), "fused_attention": self.fused_attention}
        return json.dumps(content, indent=2, sort_keys=False) + "\n"


def record_path(plan_path: Path) -> Path:
    """`model.plan` -> `model.plan.json`."""
    return plan_path.with_name(plan_path.name + ".json")


def record_from_json(text: str, where: str = "engine record") -> EngineRecord:
    """Reads `EngineRecord.to_json`; BadInput for anything else."""
    return record_from_text(text, EngineRecord, where=where, kind=KIND, version=VERSION, remedy="build it again")


def precision_of(half_weight_share: float) -> str:
    """What a graph is by its weights."""
    return {0.0: "fp32", 1.0: "fp16"}.get(half_weight_share, "mixed")


def sha256_of(content: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(content).hexdigest()
