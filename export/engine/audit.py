"""The audit of fusion: a comparison of fused attention in a dense and a reduced engine, by site and target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from export.graph.check import load_onnx
from export.graph.ports import ports_of_graph
from ground.errors import Missing

from .build import build_engine
from .options import BatchProfile, BuildOptions
from .record import EngineRecord
from .session import missing_message

VERSION = 1
KIND = "fusion-audit"
FIGURES = (
    "kernels", "kernel_kinds", "attention_sites", "fused_attention_sites", "fused_attention", "half_kernel_share",
    "kernel_types", "plan_bytes", "build_seconds", "device_memory_bytes",
)  # fmt: skip
"""Fields of an engine's record that the JSON holds."""
_BATCH = BatchProfile(smallest=1, tuned=8, largest=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Records of a dense and the reduced engine; `target` is an SM such as 86, portable, or gpu for full TensorRT."""

    target: str
    dense: EngineRecord
    reduced: EngineRecord

    @property
    def lost(self) -> tuple[str, ...]:
        """Sites that are fused in the dense engine and present, but not fused, in the reduced one."""
        unfused = set(self.reduced.attention_sites) - set(self.reduced.fused_attention_sites or ())
        return tuple(site for site in self.dense.fused_attention_sites or () if site in unfused)

    @property
    def passed(self) -> bool:
        return not self.lost

    def as_json(self) -> dict[str, Any]:
        sides = {"dense": self.dense, "reduced": self.reduced}
        return {
            "backend": self.dense.backend,
            "library_version": self.dense.library_version,
            "target": self.target,
            "passed": self.passed,
            "lost": list(self.lost),
            **{name: {key: getattr(record, key) for key in FIGURES} for name, record in sides.items()},
        }


def audit_fusion(
    dense: Path,
    reduced: Path,
    *,
    backend: str = "tensorrt-rtx",
    sms: Sequence[str] = ("86",),
    command: str = "",
) -> list[Audit]:
    """Return an Audit of both graphs, built for each target: `sms`, or for full TensorRT this machine's GPU.

    Raises what build_engine raises, and Missing when the library lists no kernels.
    """
    options = BuildOptions(backend=backend, profiles=(_BATCH,), command=command)
    targets = {sm: replace(options, sms=(sm,)) for sm in sms} if backend == "tensorrt-rtx" else {"gpu": options}
    return [
        Audit(target=target, dense=_build_for_audit(dense, choices), reduced=_build_for_audit(reduced, choices))
        for target, choices in targets.items()
    ]


def record_of_audits(audits: Sequence[Audit], *, dense: str, reduced: str) -> dict[str, Any]:
    entries = [audit.as_json() for audit in audits]
    return {"version": VERSION, "kind": KIND, "dense": dense, "reduced": reduced, "targets": entries}


def _build_for_audit(path: Path, choices: BuildOptions) -> EngineRecord:
    inputs, _ = ports_of_graph(load_onnx(path))
    if all(isinstance(size, int) for port in inputs for size in port.shape[:1]):
        choices = replace(choices, profiles=())
    record = build_engine(path, choices).record
    if record.fused_attention_sites is None:
        reason = f"version {record.library_version} does not list the kernels of an engine in a known form"
        raise Missing(missing_message(choices.backend, reason, choices.command))
    return record
