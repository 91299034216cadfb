"""INT8 and FP8 graphs of our models, with ranges measured on inputs like those in use."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corp_deploy.families.family import output_ports
from corp_deploy.families.timm_library import NORMS
from corp_deploy.spec.widths import HeadGeometry
from export.graph.fusion_breaks import with_fusion_breaks
from export.graph.quantiser import Feeds, Quantiser, ScaleChoice, build_quantiser
from export.graph.to_onnx import save_onnx
from ground.feeds import iter_batches
from ground.files import replacing

from .checkpoint import Checkpoint
from .onnx_file import GraphInput, export_form, metadata_of_checkpoint, require_sparse_graph

BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The options of INT8 and FP8 graphs."""

    rest: str = "fp16"  # the precision of what is not quantised
    scales: ScaleChoice = "auto"
    balance: bool = True  # whether factors of outlying channels move from norms into the layers after them
    keep_rest: tuple[str, ...] = ()  # patterns of modules that are not quantised
    weight_bits: int = 8  # the number of bits of INT8 weights


def quantiser_of(
    checkpoint: Checkpoint,
    feeds: Feeds,
    chosen: Quantisation,
    *,
    opset: int | None = None,
    batch: int | None = None,
    geometry: HeadGeometry | None = None,
    graph_input: GraphInput = "float32",
) -> Quantiser:
    """Return the quantiser of a model's graphs; `feeds` are inputs of the graph on which ranges are measured."""
    form = export_form(checkpoint, precision=chosen.rest, geometry=geometry, graph_input=graph_input, quantised=True)
    return build_quantiser(
        form.model,
        form.inputs,
        output_ports(checkpoint.model),
        lambda: iter_batches(feeds, BATCH),
        rest_precision=chosen.rest,
        balance=chosen.balance,
        opset=opset,
        batch=batch,
        metadata={**metadata_of_checkpoint(checkpoint), **form.notes},
        norms=NORMS,
    )


def export_quantised(
    made_of: Quantiser, path: Path, *, precision: str, chosen: Quantisation, breaks: Sequence[str] = ()
) -> None:
    """Write one graph; `breaks` as for export_checkpoint. Raises BadInput for patterns that fit no layer."""
    proto = made_of.graph(precision, scales=chosen.scales, keep=chosen.keep_rest, weight_bits=chosen.weight_bits)
    require_sparse_graph(proto, path)
    with replacing(path) as temporary:
        save_onnx(with_fusion_breaks(proto, breaks), temporary)
