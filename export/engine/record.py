"""The record that lies beside every engine: what it was made from, by what, what it holds, what it needs of a GPU's
memory (its weights, and the most that activations take at once, profile by profile), and what it costs that it runs on
more hardware.

The builder says both while it works, on a machine without a GPU too (TensorRT-RTX 1.7); a loaded engine is asked
itself. Buffers of inputs and outputs are the caller's and are not counted.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

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
    """Bytes. `activations` stand in the order of the engine's profiles, one of a fixed batch; each holds for the
    profile's largest batch, as a context of it is given that much at any. None is what nobody tells, `reason` why.
    """

    weights_bytes: Natural | None = None
    activations_bytes: tuple[Natural, ...] | None = None
    reason: str | None = None


def memory_from_log(text: str, profiles: int) -> EngineMemory:
    """From what a builder logged for `profiles` profiles (1 of a fixed batch)."""
    weights, activations = _WEIGHTS.findall(text), tuple(map(int, _ACTIVATIONS.findall(text)))
    unknown = [] if weights else [WITHOUT_WEIGHTS]
    if len(activations) != profiles:
        unknown.append(f"the builder tells the activations' memory of {len(activations)} profiles, not of {profiles}")
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
    """A plan and what it costs; None where its builder doesn't tell. `device_memory_bytes`: of its largest profile."""

    target: str
    plan_bytes: Positive
    kernels: Natural | None
    fused_attention: Natural | None
    device_memory_bytes: Natural | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLatency:
    """The compatible plan's time over the other's at a batch, with its interval: 1.04 is 4 % slower."""

    target: str
    batch: Positive
    ratio: Annotated[float, msgspec.Meta(gt=0.0)]
    low: Annotated[float, msgspec.Meta(gt=0.0)]
    high: Annotated[float, msgspec.Meta(gt=0.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibilityPrice:
    """`own`: the compatible plan; `plans`: those for one GPU each. `reason` says why a latency was not measured."""

    level: str
    own: PricedPlan
    plans: tuple[PricedPlan, ...]
    latencies: tuple[PricedLatency, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """Sizes in bytes, time in seconds, shares in [0, 1]; None where the backend does not say.

    `roles` holds what outputs are for that are not logits, by their names.
    `precision` is what the weights are, in the words of ground.precision, not what somebody calls them. `half_*` are
    shares of sixteen bits, `weight_types` and `kernel_types` shares by floating type, empty where they weren't told;
    a kernel that touches several types counts with each. `kernels` and `kernel_kinds`
    count over all profiles; with several TensorRT-RTX targets in one plan the builder lists one of them.
    `sparse_eligible` is how many layers the builder says it could run sparse, `sparse_layers` how many it does, by
    `sparse_names` where it tells them. `fusion_breaks` are outputs that stand there only to be written: nobody reads
    them. `notes` are what the graph carried beside the exporter's own, such as its preprocessing. `compatibility`: what
    running on more hardware costs, None for a plan that was not built to.
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
        """Its profiles; of a fixed batch that one alone."""
        if self.profiles:
            return tuple(map(BatchProfile.from_text, self.profiles))
        fixed = self.inputs[0].shape[0]
        size = fixed if isinstance(fixed, int) else 1
        return (BatchProfile(smallest=size, tuned=size, largest=size),)

    @property
    def device_memory_bytes(self) -> dict[str, int]:
        """Weights and activations together, by profile; empty where one of both is unknown."""
        weights, activations = self.memory.weights_bytes, self.memory.activations_bytes
        if weights is None or activations is None:
            return {}
        return {str(profile): weights + size for profile, size in zip(self.batches, activations, strict=True)}

    @property
    def fused_attention(self) -> int | None:
        """How many attention sites run as one fused kernel."""
        return None if self.fused_attention_sites is None else len(self.fused_attention_sites)

    def priced(self, target: str) -> PricedPlan:
        """What this plan costs, as one for `target`."""
        return PricedPlan(
            target=target,
            plan_bytes=self.plan_bytes,
            kernels=self.kernels,
            fused_attention=self.fused_attention,
            device_memory_bytes=max(self.device_memory_bytes.values(), default=None),
        )

    def to_json(self) -> str:
        """The record as it is written beside the plan."""
        content = {"version": VERSION, "kind": KIND, **asdict(self), "fused_attention": self.fused_attention}
        return json.dumps(content, indent=2, sort_keys=False) + "\n"


def record_path(plan_path: Path) -> Path:
    """`model.plan` -> `model.plan.json`."""
    return plan_path.with_name(plan_path.name + ".json")


def record_of_plan(plan_path: Path, *, where: str | None = None) -> EngineRecord:
    """The record beside a plan, called `where` in the BadInput that is raised when it is missing or none."""
    path = record_path(plan_path)
    if not path.exists():
        raise BadInput(f"{plan_path}: no engine record beside it ({path.name}); build it with `corp-deploy build`")
    return record_from_file(path, EngineRecord, kind=KIND, version=VERSION, where=where, remedy=AGAIN)


def sha256_of(content: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(content).hexdigest()
