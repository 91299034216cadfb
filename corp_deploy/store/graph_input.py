"""What a graph takes in place of a model's own inputs: pixels of images, uint8, normalised inside."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec
from corp_deploy.families.widths import HeadGeometry
from export.graph.pixels import takes_pixels
from ground.errors import BadInput
from ground.ports import Port

from .checkpoint import Checkpoint
from .sparse_layers import PREFIX

GraphInput = Literal["float32", "uint8"]
NORMALISED = f"{PREFIX}normalised"
AHEAD = "ahead of the model"


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
