"""ONNX graphs of our models: their exportable form, ports, metadata, check of sparsity, and the file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from onnx import ModelProto
from torch import nn

from corp_deploy import __version__
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import image_spec, output_ports
from corp_deploy.families.timm_library import NORMS
from corp_deploy.spec.sparsity import sparsity_from_text
from corp_deploy.spec.widths import HeadGeometry
from export.graph.fusion_breaks import with_fusion_breaks
from export.graph.pixels import accept_pixels
from export.graph.to_onnx import onnx_from_model, save_onnx
from export.graph.weights import sparse_matrices
from ground.errors import BadInput
from ground.files import replacing
from ground.ports import Port
from ground.records import record_from_text

from .checkpoint import Checkpoint
from .fitted import ids_of_lineage
from .graph_facts import DIGEST, NORMALISED, PREFIX, SPARSITY
from .input_sets import model_digest

# A graph carries digests and choices, but no command lines, since they hold paths of the machine that ran them.
CARRIED = ("dense", "moments", "images", "preset")
GraphInput = Literal["float32", "uint8"]
AHEAD = "ahead of the model"


def metadata_of_checkpoint(checkpoint: Checkpoint) -> dict[str, str]:
    """Return widths, cost, preprocessing, digest and lineage as the flat metadata of an ONNX file."""
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
    """The exportable model that is traced, its input ports, and the graph's notes on them."""

    model: nn.Module
    inputs: tuple[Port, ...]
    notes: Mapping[str, str] = field(default_factory=dict)


def graph_ports(checkpoint: Checkpoint, graph_input: GraphInput) -> tuple[Port, ...]:
    """Return the graph's input ports. Raises BadInput for uint8 where no normalisation of images is known."""
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
    """Return the exportable form of a model.

    A `graph_input` of uint8 takes pixels [B,C,H,W], resized and cropped; their normalisation is folded into the model
    unless it becomes FP16 or `quantised`. Raises BadInput as graph_ports does.
    """
    ports = graph_ports(checkpoint, graph_input)
    model = traced_model.exportable(checkpoint.model, geometry=geometry)
    if graph_input == "float32":
        return ExportForm(model=model, inputs=ports)
    normalisation = image_spec(checkpoint.model).normalisation
    own, folded_into = accept_pixels(model, ports[0].shape, normalisation, folded=precision == "fp32" and not quantised)
    inside = {"mean": normalisation.mean, "std": normalisation.std, "in": folded_into or AHEAD}
    return ExportForm(model=own, inputs=ports, notes={NORMALISED: json.dumps(inside, sort_keys=True)})


def paths_by_precision(path: Path, precisions: Sequence[str]) -> dict[str, Path]:
    """Return the path itself for one precision; for several NAME.onnx for fp32, NAME.fp16.onnx for fp16 and so on."""
    if len(precisions) == 1:
        return {precisions[0]: path}
    return {name: path if name == "fp32" else path.with_suffix(f".{name}{path.suffix}") for name in precisions}


def require_sparse_graph(proto: ModelProto, path: Path) -> None:
    """Raise BadInput for a graph whose stored matrices are not as sparse as the model's layers.

    A layer's matrices are those of nodes under its name; for layers without any, as many other matrices must be sparse.
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
    """Write the model as one typed ONNX file; `breaks` are names or patterns that builders must not fuse across."""
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
        save_onnx(with_fusion_breaks(proto, breaks), temporary)
