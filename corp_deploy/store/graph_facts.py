"""Facts that an ONNX file or a package of AOTInductor states about itself, read without torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calib.fingerprints_text import FingerprintsText
from export.graph.fusion_breaks import NOTE
from export.graph.package_notes import SUFFIX, notes_of_package
from export.graph.ports import GraphPort, ports_of_graph
from ground.errors import BadInput
from ground.onnx_file import read_onnx
from ground.ports import Port
from ground.quantity import quoted
from ground.records import record_from_text
from perf.runners.onnx import onnx_precision

from .fitted import fitted_of_lineage

PREFIX, SPARSITY, DIGEST = "corp_deploy.", "sparsity", "model_sha256"
NORMALISED = f"{PREFIX}normalised"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """Facts that a graph states about itself; facts that another tool's graph lacks are None.

    A package has the operator set 0.
    """

    precision: str
    opset: int
    batch: int | None  # the fixed batch size, None for a free one
    inputs: tuple[Port, ...]
    macs: int | None
    parameters: int | None
    rest: str | None = None  # the precision of what a quantised graph does not quantise
    scales: str | None = None  # the method that chose a quantised graph's calibrated ranges
    weight_bits: int = 8
    fusion_breaks: tuple[str, ...] = ()
    normalised: str | None = None  # where a graph that takes pixels normalises them
    fitted: FingerprintsText | None = None  # the fingerprints of the inputs that its model was fitted to
    model_sha256: str | None = None
    compiled_for: str | None = None  # the instruction set or the compute capability of a package


def facts_of_onnx(path: Path) -> GraphFacts:
    """Return a graph's facts. Raises BadInput for a file that is no ONNX model whose inputs begin with a batch."""
    proto = read_onnx(path, weights=False)
    carried = {entry.key: entry.value for entry in proto.metadata_props}
    inputs, _ = ports_of_graph(proto)
    if not inputs or not all(port.shape for port in inputs):
        listed = ", ".join(f"{port.name}: {port.dtype} {list(port.shape)}" for port in inputs) or "none"
        raise BadInput(f"{path}: expected inputs with a batch in front, got {listed}; it is no model to be served")
    precision = carried.get("export.precision") or onnx_precision(path)
    opset = max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    return _facts_of_metadata(carried, path, precision=precision, opset=opset, inputs=inputs)


def facts_of_package(path: Path) -> GraphFacts:
    """Return a package's facts. Raises BadInput for a file without the notes of `export --format aoti`."""
    notes = notes_of_package(path)
    facts = _facts_of_metadata(notes.carried, path, precision=notes.precision, opset=0, inputs=notes.inputs)
    return replace(facts, compiled_for=notes.compiled_for)


def facts_of_graph(path: Path) -> GraphFacts:
    return facts_of_package(path) if path.suffix == SUFFIX else facts_of_onnx(path)


def _facts_of_metadata(
    carried: Mapping[str, str], path: Path, *, precision: str, opset: int, inputs: Sequence[GraphPort]
) -> GraphFacts:
    batches = [port.shape[0] for port in inputs if isinstance(port.shape[0], int)]
    where = f"{path}: its metadata"
    lineage = record_from_text(carried.get(f"{PREFIX}lineage", "{}"), dict[str, Any], where=where)
    return GraphFacts(
        precision=precision,
        opset=opset,
        batch=min(batches, default=None),
        inputs=tuple(map(port_of, inputs)),
        macs=_integer(carried, "macs", path),
        parameters=_integer(carried, "parameters", path),
        rest=carried.get("export.rest"),
        scales=carried.get("export.scales"),
        weight_bits=7 if carried.get("export.weight_bits") == "7" else 8,
        fusion_breaks=tuple(carried.get(NOTE, "").split()),
        normalised=_where_normalised(carried),
        fitted=fitted_of_lineage(lineage, where=where),
        model_sha256=carried.get(f"{PREFIX}{DIGEST}"),
    )


def port_of(port: GraphPort) -> Port:
    """Return the port of a graph's input without its batch; an open size is -1."""
    sizes = tuple(size if isinstance(size, int) else -1 for size in port.shape[1:])
    return Port(name=port.name, shape=sizes, dtype=port.dtype)


def _where_normalised(carried: Mapping[str, str]) -> str | None:
    try:
        note = record_from_text(carried.get(NORMALISED, "{}"), dict[str, Any], where=NORMALISED)
    except BadInput:
        return None
    return str(note["in"]) if "in" in note else None


def _integer(carried: Mapping[str, str], name: str, path: Path) -> int | None:
    text = carried.get(f"{PREFIX}{name}", "null")
    if text == "null":
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise BadInput(f"{path}: its metadata say {name} {quoted(text)}, expected a whole number; export it again")
    return int(text)
