"""Whether a reduced graph keeps the fused attention of its dense one, block by block and target by target."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.graph.check import load_onnx
from export.graph.ports import ports_of_graph
from ground.errors import Missing

from .build import build_engine
from .fusion import Fusion
from .options import BatchProfile, BuildOptions
from .session import missing_message

VERSION = 1
KIND = "fusion-audit"
_BATCH = BatchProfile(smallest=1, tuned=8, largest=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedEngine:
    """One engine of an audit: its kernels, the plan's size in bytes and build time in seconds, and the memory that it
    takes on a device by profile, empty where nobody tells.
    """

    fusion: Fusion
    plan_bytes: int
    build_seconds: float
    memory_bytes: Mapping[str, int]

    def summary(self) -> dict[str, Any]:
        """What the JSON holds of it."""
        return {
            "kernels": len(self.fusion.kernels),
            "kernel_kinds": self.fusion.kinds,
            "attention_sites": list(self.fusion.attention_sites),
            "fused_attention_sites": list(self.fusion.fused_sites),
            "fused_attention": self.fusion.fused_attention,
            "half_kernel_share": self.fusion.half_kernel_share,
            "kernel_types": self.fusion.kernel_types,
            "plan_bytes": self.plan_bytes,
            "build_seconds": self.build_seconds,
            "device_memory_bytes": dict(self.memory_bytes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Dense beside reduced for one target; `target` is an SM such as 86, portable, or gpu for full TensorRT."""

    backend: str
    library_version: str
    target: str
    dense: AuditedEngine
    reduced: AuditedEngine

    @property
    def lost(self) -> tuple[str, ...]:
        """Sites that are fused in the dense engine and still there, but not fused, in the reduced one."""
        fused = set(self.reduced.fusion.fused_sites)
        present = set(self.reduced.fusion.attention_sites)
        return tuple(site for site in self.dense.fusion.fused_sites if site in present and site not in fused)

    @property
    def passed(self) -> bool:
        """True when no site lost its fused kernel; a dense engine without any has nothing to lose."""
        return not self.lost


def audit_fusion(
    dense: Path,
    reduced: Path,
    *,
    backend: str = "tensorrt-rtx",
    sms: Sequence[str] = ("86",),
    batch: BatchProfile = _BATCH,
    command: str = "",
) -> list[Audit]:
    """Builds both graphs once per target and compares them; one entry per target, in the order of `sms`.

    TensorRT-RTX needs no GPU; full TensorRT builds for the GPU at hand and takes no `sms`. `batch` is used for graphs
    with a dynamic batch. Raises what build_engine raises, and Missing when the library lists no kernels.
    """
    targets = tuple(sms) if backend == "tensorrt-rtx" else ("gpu",)
    audits = []
    for target in targets:
        choices = BuildOptions(
            backend=backend, sms=(target,) if backend == "tensorrt-rtx" else (), profiles=(batch,), command=command
        )
        pair = [_audited_engine(path, choices) for path in (dense, reduced)]
        version = pair[0][1]
        audits.append(
            Audit(backend=backend, library_version=version, target=target, dense=pair[0][0], reduced=pair[1][0])
        )
    return audits


def audit_to_json(audits: Sequence[Audit], *, dense: str, reduced: str) -> str:
    """The whole audit as one versioned object; `dense` and `reduced` are the names to show."""
    entries = [
        {
            "backend": audit.backend,
            "library_version": audit.library_version,
            "target": audit.target,
            "passed": audit.passed,
            "lost": list(audit.lost),
            "dense": audit.dense.summary(),
            "reduced": audit.reduced.summary(),
        }
        for audit in audits
    ]
    content = {"version": VERSION, "kind": KIND, "dense": dense, "reduced": reduced, "targets": entries}
    return json.dumps(content, indent=2) + "\n"


def _audited_engine(path: Path, choices: BuildOptions) -> tuple[AuditedEngine, str]:
    inputs, _ = ports_of_graph(load_onnx(path))
    if all(isinstance(size, int) for port in inputs for size in port.shape[:1]):
        choices = BuildOptions(backend=choices.backend, sms=choices.sms, command=choices.command)
    engine = build_engine(path, choices)
    if engine.fusion is None:
        reason = f"version {engine.record.library_version} does not list the kernels of an engine in a known form"
        raise Missing(missing_message(choices.backend, reason, choices.command))
    record = engine.record
    audited = AuditedEngine(
        fusion=engine.fusion,
        plan_bytes=record.plan_bytes,
        build_seconds=record.build_seconds,
        memory_bytes=record.device_memory_bytes,
    )
    return audited, record.library_version
