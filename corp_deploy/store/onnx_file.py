"""ONNX graphs of our models: the exportable form, the lineage they carry, and what a graph says about itself."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.fingerprints import Fingerprints
from corp_deploy import __version__
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import output_ports
from corp_deploy.families.norm_types import NORMS
from corp_deploy.families.widths import HeadGeometry
from export.graph.fusion_breaks import NOTE, with_fusion_breaks
from export.graph.ports import GraphPort, ports_of_graph
from export.graph.to_onnx import onnx_from_model, save
from ground.errors import BadInput
from ground.files import replacing
from ground.onnx_file import read_onnx
from ground.ports import Port
from ground.quantity import quoted
from ground.records import record_from_text
from perf.runners.onnx import onnx_precision

from .checkpoint import Checkpoint, fitted_of_lineage, ids_of_lineage
from .graph_input import NORMALISED, GraphInput, export_form
from .inputs import model_digest
from .sparse_layers import PREFIX as PREFIX
from .sparse_layers import SPARSITY, require_sparse_graph

# Digests and choices travel with the graph; command lines do not, they hold paths of the machine that ran them.
CARRIED = ("dense", "moments", "images", "preset")


def metadata_of_checkpoint(checkpoint: Checkpoint) -> dict[str, str]:
    """Widths, cost, preprocessing, digest and lineage, as the flat text that an ONNX file carries."""
    widths = {site.name: site.as_metadata() for site in traced_model.sites_of(checkpoint.model).every}
    facts = {
        "version": __version__,
        "architecture": checkpoint.architecture.name,
        "model_sha256": model_digest(checkpoint.model),
        "parameters": parameters(checkpoint.model),
        "macs": macs(checkpoint.model),
        "depth": traced_model.depth(checkpoint.model),
        "widths": widths,
        "preprocessing": traced_model.input_spec(checkpoint.model).as_json(),
        "lineage": {key: value for key, value in checkpoint.lineage.items() if key in CARRIED}
        | ids_of_lineage(checkpoint.lineage),
        **({SPARSITY: dict(checkpoint.sparsity)} if checkpoint.sparsity else {}),
    }
    return {
        PREFIX + key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for key, value in facts.items()
    }


def paths_by_precision(path: Path, precisions: Sequence[str]) -> dict[str, Path]:
    """One precision goes to the very file; several stand side by side: NAME.onnx for fp32, NAME.fp16.onnx for fp16."""
    if len(precisions) == 1:
        return {precisions[0]: path}
    return {name: path if name == "fp32" else path.with_suffix(f".{name}{path.suffix}") for name in precisions}


def export_checkpoint(
    checkpoint: Checkpoint,
    path: Path,
    *,
    precision: str,
    opset: int | None = None,
    batch: int | None = None,
    keep_fp32: Sequence[str] = (),
    geometry: HeadGeometry | None = None,
    breaks: Sequence[str] = (),
    graph_input: GraphInput = "float32",
) -> None:
    """Write the model as one typed ONNX file; `breaks` name what builders must not fuse across, `graph_input` as for
    export_form. Raises export's BadInput when the graph will not do.
    """
    form = export_form(checkpoint, precision=precision, geometry=geometry, graph_input=graph_input)
    proto = onnx_from_model(
        form.model,
        form.inputs,
        output_ports(checkpoint.model),
        precision=precision,
        keep_fp32=keep_fp32,
        opset=opset,
        batch=batch,
        metadata={**metadata_of_checkpoint(checkpoint), **form.notes},
        norms=NORMS,
    )
    require_sparse_graph(proto, path)
    with replacing(path) as temporary:
        save(with_fusion_breaks(proto, breaks), temporary)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """What an ONNX file says about itself; costs are None for a graph that another tool wrote, a batch that is free is
    None too. `rest`: of a quantised graph the precision of all else, `scales` where its ranges end, `weight_bits` how
    many bits its weights use; `normalised`: of a graph that takes pixels, where it normalises them; `fitted`: what its
    model was fitted to, where it tells.
    """

    precision: str
    opset: int
    batch: int | None
    inputs: tuple[Port, ...]
    macs: int | None
    parameters: int | None
    rest: str | None = None
    scales: str | None = None
    weight_bits: int = 8
    fusion_breaks: tuple[str, ...] = ()
    normalised: str | None = None
    fitted: Fingerprints | None = None


def facts_of_onnx(path: Path) -> GraphFacts:
    """Read a graph's facts. Raises BadInput for a file that is no ONNX model of inputs with a batch in front."""
    proto = read_onnx(path, weights=False)
    carried = {entry.key: entry.value for entry in proto.metadata_props}
    inputs, _ = ports_of_graph(proto)
    if not inputs or not all(port.shape for port in inputs):
        listed = ", ".join(f"{port.name}: {port.dtype} {list(port.shape)}" for port in inputs) or "none"
        raise BadInput(f"{path}: expected inputs with a batch in front, got {listed}; it is no model to be served")
    batches = [port.shape[0] for port in inputs if isinstance(port.shape[0], int)]
    where = f"{path}: its metadata"
    lineage = record_from_text(carried.get(f"{PREFIX}lineage", "{}"), dict[str, Any], where=where)
    return GraphFacts(
        precision=carried.get("export.precision") or onnx_precision(path),
        opset=max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0),
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
    )


def port_of(port: GraphPort) -> Port:
    """A size that is open is -1."""
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
