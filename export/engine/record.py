"""The record beside every engine: its graph, builder, kernels and GPU memory, and the price of compatibility.

Memory doesn't include the buffers of inputs and outputs, which the caller allocates.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from export.graph.ports import GraphPort
from ground.errors import BadInput
from ground.ports import Role
from ground.records import Natural, Positive, Sha256, Share, record_from_file

from .options import BatchProfile

_WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")
WITHOUT_WEIGHTS = "the builder doesn't tell the weights' memory"
_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory in bytes, None if unknown for the `reason`; activations are by profile, for its largest batch."""

    weights_bytes: Natural | None = None
    activations_bytes: tuple[Natural, ...] | None = None
    reason: str | None = None


def memory_from_log(text: str, profiles: int) -> EngineMemory:
    weights, activations = _WEIGHTS.findall(text), tuple(map(int, _ACTIVATIONS.findall(text)))
    unknown = [] if weights else [WITHOUT_WEIGHTS]
    if len(activations) != profiles:
        unknown.append(f"the builder logs the activations' memory of {len(activations)} profiles, expected {profiles}")
    return EngineMemory(
        weights_bytes=int(weights[-1]) if weights else None,
        activations_bytes=activations if len(activations) == profiles else None,
        reason="; ".join(unknown) or None,
    )


VERSION = 1
KIND = "engine"
AGAIN = "build it again with `corp-deploy build`"
WITHOUT_MEMORY = "ONNX Runtime tells no memory of a graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan's costs, None if unknown; `device_memory_bytes` is that of its largest profile."""

    target: str
    plan_bytes: Positive
    kernels: Natural | None
    fused_attention: Natural | None
    device_memory_bytes: Natural | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLatency:
    """The latency of a compatible plan relative to an exact one at a batch, with its interval: 1.04 is 4 % slower."""

    target: str
    batch: Positive
    ratio: Annotated[float, msgspec.Meta(gt=0.0)]
    low: Annotated[float, msgspec.Meta(gt=0.0)]
    high: Annotated[float, msgspec.Meta(gt=0.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibilityPrice:
    """The costs of a compatible plan, `own`, and of plans for one GPU each; `reason`: why a latency is missing."""

    level: str
    own: PricedPlan
    plans: tuple[PricedPlan, ...]
    latencies: tuple[PricedLatency, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """The facts of an engine: sizes in bytes, times in seconds, shares in [0, 1]; None where the backend gives none.

    `roles` are those of outputs that aren't logits, `precision` is that of the stored weights, `half_*` are shares of
    sixteen bits. A kernel that touches several types counts for each; `kernels` are counted over all profiles.
    `sparse_eligible` layers could run sparse, `sparse_layers` do. `fusion_breaks` are outputs that nobody reads,
    `notes` the graph's notes, such as preprocessing, and `compatibility` is the price of running on more hardware.
    """

    backend: str
    library_version: str
    command: str
    onnx_sha256: Sha256
    onnx_bytes: Positive
    plan_sha256: Sha256
    plan_bytes: Positive
    precision: str
    half_weight_share: Share
    half_kernel_share: Share | None
    targets: tuple[str, ...]
    gpu: str | None
    profiles: tuple[str, ...]
    inputs: Annotated[tuple[GraphPort, ...], msgspec.Meta(min_length=1)]
    outputs: Annotated[tuple[GraphPort, ...], msgspec.Meta(min_length=1)]
    kernels: Natural | None
    kernel_kinds: Mapping[str, Natural]
    attention_sites: tuple[str, ...]
    fused_attention_sites: tuple[str, ...] | None
    build_seconds: Annotated[float, msgspec.Meta(ge=0.0)]
    options: Mapping[str, str | int | float | bool]
    roles: Mapping[str, Role] = field(default_factory=dict)
    weight_types: Mapping[str, Share] = field(default_factory=dict)
    kernel_types: Mapping[str, Share] = field(default_factory=dict)
    sparse_eligible: Natural | None = None
    sparse_layers: Natural | None = None
    sparse_names: tuple[str, ...] = ()
    fusion_breaks: tuple[GraphPort, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    compatibility: CompatibilityPrice | None = None
    memory: EngineMemory

    def __post_init__(self) -> None:
        for profile in self.profiles:
            BatchProfile.from_text(profile)
        sizes = self.memory.activations_bytes
        if sizes is not None and len(sizes) != len(self.batches):
            raise BadInput(f"memory of {len(sizes)} profiles, expected {len(self.batches)}: {', '.join(self.profiles)}")

    @property
    def batches(self) -> tuple[BatchProfile, ...]:
        """The engine's profiles, or one for its fixed batch."""
        if self.profiles:
            return tuple(map(BatchProfile.from_text, self.profiles))
        fixed = self.inputs[0].shape[0]
        size = fixed if isinstance(fixed, int) else 1
        return (BatchProfile(smallest=size, tuned=size, largest=size),)

    @property
    def device_memory_bytes(self) -> dict[str, int]:
        """Bytes of weights plus activations by profile, such as 1:8:64; empty if either is unknown."""
        weights, activations = self.memory.weights_bytes, self.memory.activations_bytes
        if weights is None or activations is None:
            return {}
        return {str(profile): weights + size for profile, size in zip(self.batches, activations, strict=True)}

    @property
    def fused_attention(self) -> int | None:
        return None if self.fused_attention_sites is None else len(self.fused_attention_sites)

    def priced(self, target: str) -> PricedPlan:
        return PricedPlan(
            target=target,
            plan_bytes=self.plan_bytes,
            kernels=self.kernels,
            fused_attention=self.fused_attention,
            device_memory_bytes=max(self.device_memory_bytes.values(), default=None),
        )

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, "kind": KIND, **asdict(self), "fused_attention": self.fused_attention}


def record_path(plan_path: Path) -> Path:
    return plan_path.with_name(plan_path.name + ".json")


def record_of_plan(plan_path: Path, *, where: str | None = None) -> EngineRecord:
    """Read the record beside a plan. Raises BadInput, which names it `where`, when it is missing or invalid."""
    path = record_path(plan_path)
    if not path.exists():
        raise BadInput(f"{plan_path}: no engine record beside it ({path.name}); build it with `corp-deploy build`")
    return record_from_file(path, EngineRecord, kind=KIND, version=VERSION, where=where, remedy=AGAIN)


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
