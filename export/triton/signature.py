"""The signature of an artefact: ports, batches and roles, read from the artefact itself, for an inference server."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from export.engine.options import BatchProfile
from export.engine.record import EngineRecord
from export.graph.check import load_onnx
from export.graph.package_notes import PackageNotes
from export.graph.ports import GraphPort, ports_of_graph, roles_of_graph
from ground.errors import BadInput
from ground.ports import LOGITS, Role

SERVED_TYPES = {
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
    **{f"{kind}{bits}": f"TYPE_{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{"bfloat16": "TYPE_BF16", "bool": "TYPE_BOOL", "string": "TYPE_STRING"},
}
FLOATING = ("float32", "float16", "float64", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """An artefact's ports, a plan's batch profiles, and a graph's opset and IR version (0 for a plan)."""

    inputs: tuple[GraphPort, ...]
    outputs: tuple[GraphPort, ...]
    roles: Mapping[str, Role]
    profiles: tuple[BatchProfile, ...] = ()
    fusion_breaks: tuple[GraphPort, ...] = ()
    opset: int = 0
    ir: int = 0

    @property
    def output_roles(self) -> dict[str, Role]:
        return {port.name: self.roles.get(port.name, LOGITS.role) for port in self.outputs}

    @property
    def fixed_batch(self) -> int | None:
        size = self.inputs[0].shape[0] if self.inputs and self.inputs[0].shape else None
        return size if isinstance(size, int) else None

    @property
    def smallest_batch(self) -> int:
        return min((profile.smallest for profile in self.profiles), default=1)

    @property
    def largest_batch(self) -> int | None:
        return max((profile.largest for profile in self.profiles), default=None)

    @property
    def profile_batches(self) -> tuple[int, ...]:
        return tuple(sorted({size for each in self.profiles for size in (each.smallest, each.tuned, each.largest)}))


def signature_from_onnx(path: Path) -> Signature:
    """Read a graph's signature. Raises BadInput for no ONNX, no ports, and inputs with different batches."""
    proto = load_onnx(path)
    inputs, outputs = ports_of_graph(proto)
    if not inputs or not outputs:
        took, gave = (", ".join(port.name for port in side) or "nothing" for side in (inputs, outputs))
        raise BadInput(f"{path}: takes {took} and gives {gave}, expected inputs and outputs; export it again")
    batches = {port.shape[0] for port in inputs if port.shape}
    if len(batches) > 1:
        named = ", ".join(f"{port.name} {list(port.shape)}" for port in inputs)
        raise BadInput(f"{path}: its inputs have different batches ({named}); export them with one that they share")
    opset = max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    _, breaks = ports_of_graph(proto, breaks=True)
    own = Signature(
        inputs=inputs,
        outputs=outputs,
        fusion_breaks=breaks,
        roles=roles_of_graph(proto),
        opset=opset,
        ir=proto.ir_version,
    )
    return _require_served_types(own, path)


def signature_from_record(record: EngineRecord) -> Signature:
    own = Signature(
        inputs=record.inputs,
        outputs=record.outputs,
        fusion_breaks=record.fusion_breaks,
        roles=record.roles,
        profiles=tuple(map(BatchProfile.from_text, record.profiles)),
    )
    return _require_served_types(own, "engine record")


def signature_from_package(notes: PackageNotes, *, where: Path) -> Signature:
    """Return a package's signature, with the names that Triton's PyTorch backend gives tensors by their places."""
    outputs = {port.name: f"OUTPUT__{place}" for place, port in enumerate(notes.outputs)}
    own = Signature(
        inputs=tuple(replace(port, name=f"INPUT__{place}") for place, port in enumerate(notes.inputs)),
        outputs=tuple(replace(port, name=outputs[port.name]) for port in notes.outputs),
        roles={outputs[name]: role for name, role in notes.roles.items()},
    )
    return _require_served_types(own, where)


def _require_served_types(own: Signature, where: Path | str) -> Signature:
    """Return the signature. Raises BadInput for a port of a type that no inference server has."""
    for port in (*own.inputs, *own.outputs, *own.fusion_breaks):
        if port.dtype not in SERVED_TYPES:
            raise BadInput(
                f"{where}: {port.name} is {port.dtype}, which has no inference server type; export it as float32"
            )
    return own
