"""ONNX graphs of our models: the exportable form, the lineage they carry, and what a graph says about itself."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from onnx import ModelProto
from torch import nn

from calib.fingerprints import Fingerprints
from corp_deploy import __version__
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import image_spec, output_ports
from corp_deploy.families.timm_library import NORMS
from corp_deploy.spec.sparsity import sparsity_from_text
from corp_deploy.spec.widths import HeadGeometry
from export.graph.fusion_breaks import NOTE, with_fusion_breaks
from export.graph.pixels import takes_pixels
from export.graph.ports import GraphPort, ports_of_graph
from export.graph.to_onnx import onnx_from_model, save
from export.graph.weights import sparse_matrices
from ground.errors import BadInput
from ground.files import replacing
from ground.onnx_file import read_onnx
from ground.ports import Port
from ground.quantity import quoted
from ground.records import record_from_text
from perf.runners.onnx import onnx_precision

from .checkpoint import Checkpoint, fitted_of_lineage, ids_of_lineage
from .inputs import model_digest

# Digests and choices travel with the graph; command lines do not, they hold paths of the machine that ran them.
CARRIED = ("dense", "moments", "images", "preset")
GraphInput = Literal["float32", "uint8"]
PREFIX, SPARSITY, DIGEST = "corp_deploy.", "sparsity", "model_sha256"
NORMALISED = f"{PREFIX}normalised"
AHEAD = "ahead of the model"


def metadata_of_checkpoint(checkpoint: Checkpoint) -> dict[str, str]:
    """Widths, cost, preprocessing, digest and lineage, as the flat text that an ONNX file carries."""
    widths = {site.name: site.as_metadata() for site in traced_model.sites_of(checkpoint.model).every}
    facts = {
        "version": __version__,
        "architecture": checkpoint.architecture.name,
        DIGEST: model_digest(checkpoint.model),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportForm:
    """What is traced: the exportable model, its ports, and what the graph's notes say of them."""

    model: nn.Module
    inputs: tuple[Port, ...]
    notes: Mapping[str, str] = field(default_factory=dict)


def graph_ports(checkpoint: Checkpoint, graph_input: GraphInput) -> tuple[Port, ...]:
    """What the graph takes. Raises BadInput for uint8 of a model that isn't known to normalise images."""
    spec = traced_model.input_spec(checkpoint.model)
    if graph_input == "float32":
        return spec.ports
    if spec.medium != "images" or len(spec.ports) != 1:
        raise BadInput(f"input uint8 is for models of images, this one takes {spec.medium}; leave --input out")
    image_spec(checkpoint.model).require_normalisation(where=f"input {graph_input}", instead="leave --input out")
    return tuple(replace(port, dtype=graph_input) for port in spec.ports)


def export_form(
    checkpoint: Checkpoint,
    *,
    precision: str,
    geometry: HeadGeometry | None = None,
    graph_input: GraphInput = "float32",
    quantised: bool = False,
) -> ExportForm:
    """The exportable form of a model. `graph_input` uint8: pixels [B,C,H,W], resized and cropped as its preprocessing
    says; `quantised`: INT8 or FP8 is made of it.

    Raises BadInput as graph_ports does.
    """
    ports = graph_ports(checkpoint, graph_input)
    model = traced_model.exportable(checkpoint.model, geometry=geometry)
    if graph_input == "float32":
        return ExportForm(model=model, inputs=ports)
    normalisation = image_spec(checkpoint.model).normalisation
    own, folded_into = takes_pixels(model, ports[0].shape, normalisation, folded=precision == "fp32" and not quantised)
    inside = {"mean": normalisation.mean, "std": normalisation.std, "in": folded_into or AHEAD}
    return ExportForm(model=own, inputs=ports, notes={NORMALISED: json.dumps(inside, sort_keys=True)})


def paths_by_precision(path: Path, precisions: Sequence[str]) -> dict[str, Path]:
    """One precision goes to the very file; several stand side by side: NAME.onnx for fp32, NAME.fp16.onnx for fp16."""
    if len(precisions) == 1:
        return {precisions[0]: path}
    return {name: path if name == "fp32" else path.with_suffix(f".{name}{path.suffix}") for name in precisions}


def require_sparse_graph(proto: ModelProto, path: Path) -> None:
    """Raise BadInput for a graph whose matrices, as they are stored in whatever type, are not as sparse as the layers.

    Matrices are known by the layer that their node is of; where a graph has other names, as many must be sparse.
    """
    carried = {entry.key: entry.value for entry in proto.metadata_props}.get(f"{PREFIX}{SPARSITY}", "{}")
    patterns = record_from_text(carried, dict[str, str], where=f"{path}: its {SPARSITY}")
    for text in dict.fromkeys(patterns.values()):
        sparsity, layers = sparsity_from_text(text), [name for name, each in patterns.items() if each == text]
        holds_by_node = sparse_matrices(proto, sparsity.kept, sparsity.of)
        of_layer = {name: [node for node in holds_by_node if node.rpartition("/")[0] == name] for name in layers}
        dense = [name for name, nodes in of_layer.items() if not all(holds_by_node[node] for node in nodes)]
        named = {node for nodes in of_layer.values() for node in nodes}
        others = sum(holds for node, holds in holds_by_node.items() if node not in named)
        unnamed = [name for name, nodes in of_layer.items() if not nodes]
        if dense or len(unnamed) > others:
            raise BadInput(
                f"{path}: {(dense or unnamed)[0]} is {text} in the model, but not in the graph ({len(dense)} of "
                f"{len(layers)} layers are dense there, {max(len(unnamed) - others, 0)} are missing)"
            )


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
    model was fitted to, `model_sha256` the digest of that, where it tells.
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
    model_sha256: str | None = None


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
        model_sha256=carried.get(f"{PREFIX}{DIGEST}"),
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
