"""Fault location: the block where a link fails, and the command that exports the graph without the fault."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from corp_deploy.families import traced_model
from corp_deploy.families.family import output_ports
from corp_deploy.families.timm_library import NORMS
from corp_deploy.invocation.option import Invocation
from corp_deploy.store.checkpoint import CONFIG, Checkpoint
from corp_deploy.store.onnx_file import GraphInput, export_form
from corp_deploy.store.quantised_onnx import Quantisation, quantiser_of
from export.graph.precision import modules_beyond
from export.graph.to_onnx import onnx_from_model
from ground.errors import BadInput
from ground.feeds import Feeds, select_rows
from ground.onnx_file import read_onnx
from ground.ports import Role
from ground.precision import EVERY_WORD, FLOAT16, FloatType, mixed_with_float32
from perf.parity.block_outputs import locate_in_exact, locate_in_half, measure_block_noise, site_of
from perf.parity.locate import FaultLocation
from perf.parity.measures import measure_relative_errors

from .candidates import Candidate
from .own_noise import quantised_word

WORST_INPUTS = 16


def select_worst_inputs(
    feeds: Feeds, reference: NDArray[np.floating], candidate: NDArray[np.floating], role: Role
) -> Feeds:
    """Return the WORST_INPUTS inputs with the largest relative errors, those with NaN or Inf first."""
    off_N = np.nan_to_num(measure_relative_errors(reference, candidate, role=role), nan=np.inf)
    return select_rows(feeds, np.argsort(-off_N, kind="stable")[:WORST_INPUTS])


def graph_of_checkpoint(checkpoint: Checkpoint, precision: str, keep_fp32: Sequence[str] = ()) -> onnx.ModelProto:
    return onnx_from_model(
        traced_model.exportable(checkpoint.model),
        traced_model.input_spec(checkpoint.model).ports,
        output_ports(checkpoint.model),
        precision=precision,
        keep_fp32=keep_fp32,
        metadata={},
        norms=NORMS,
    )


def half_precision_of(dense: Checkpoint, float_type: FloatType) -> tuple[str, tuple[str, ...]]:
    """Return the precision in which to export a dense model to this type, and the layers that must stay in FP32.

    These are layers with weights beyond the type's largest number; with any of them the precision is mixed.
    """
    kept, mixed = modules_beyond(traced_model.exportable(dense.model), float_type), mixed_with_float32(float_type)
    return (mixed.name if kept else mixed.pure), kept


def measure_dense_noise(dense: Checkpoint, feeds: Feeds, float_type: FloatType) -> Mapping[str, float]:
    if (word := quantised_word(float_type)) is not None:
        plain = quantiser_of(dense, feeds, Quantisation(rest="fp32", scales="max", balance=False))
        return measure_block_noise(plain.fp32_graph, plain.graph(word, scales="max"), feeds)
    return measure_block_noise(
        graph_of_checkpoint(dense, "fp32"), graph_of_checkpoint(dense, *half_precision_of(dense, float_type)), feeds
    )


def balanced_sites(proto: onnx.ModelProto) -> set[str]:
    """Return the sites whose norms were balanced before quantisation, according to the graph's metadata."""
    names = next((entry.value for entry in proto.metadata_props if entry.key == "export.balanced"), "")
    return {site_of(f"{name}/") for name in names.split()}


def build_fix_command(
    graph: Path,
    shown: Path | None = None,
    float_type: FloatType = FLOAT16,
    graph_input: GraphInput = "float32",
    rest: str | None = None,
    weight_bits: int = 8,
) -> str:
    """Return the command that exports the failing graph again, beside it, with `{site}` kept in more bits."""
    beside = (graph.parent / CONFIG).is_file()
    graph = shown or graph
    stem = graph.name.removesuffix(".onnx")
    stem = next((stem.removesuffix(f".{word}") for word in EVERY_WORD if stem.endswith(f".{word}")), stem)
    quantised = quantised_word(float_type)
    word = quantised or mixed_with_float32(float_type).name
    options: dict[str, Any] = {"model": graph.parent if beside else "DIR", "precision": word}
    if quantised is None:
        options |= {"keep_fp32": ["{site}"]}
    else:
        options |= {"keep_rest": ["{site}"], "images": "IMAGES"}
        options |= {"rest": rest} if rest not in (None, Quantisation().rest) else {}
        options |= {"weight_bits": weight_bits} if weight_bits != 8 else {}
    options |= {"input": graph_input} if graph_input != "float32" else {}
    return str(Invocation(command="export", options=options | {"output": graph.with_name(f"{stem}.{word}.onnx")}))


def locate_fault_of_link(
    name: str, failing: Candidate, before: Candidate | None, dense: Checkpoint, feeds: Feeds, products: int
) -> FaultLocation | None:
    """Locate the block where a failing graph errs; return None if its blocks can't be compared with the step before."""
    if failing.form != "graph" or failing.runtime is not None or before is None:
        return None  # blocks are compared in ONNX Runtime
    if before.form == "graph" and before.takes_pixels != failing.takes_pixels:
        return None  # and two graphs need the same inputs
    graph_input: GraphInput = "uint8" if failing.takes_pixels else "float32"
    try:
        if failing.rounds and before.form == "graph":
            float_type = failing.float_type
            kept: dict[str, Any] = {"rest": failing.rest, "weight_bits": failing.weight_bits}
            command = build_fix_command(failing.path, failing.shown, float_type, graph_input, **kept)
            noise, half = measure_dense_noise(dense, feeds, float_type), read_onnx(failing.path)
            return locate_in_half(
                name,
                read_onnx(before.path),
                half,
                failing.fed(feeds),
                noise=noise,
                fix_command=command,
                float_type=float_type,
                scaled=balanced_sites(half),
            )
        if before.form == "torch" and before.checkpoint is not None and not failing.rounds:
            model = export_form(before.checkpoint, precision="fp32", graph_input=graph_input).model
            return locate_in_exact(name, model, read_onnx(failing.path), failing.fed(feeds), products=products)
    except BadInput:
        return None  # the graph has other blocks, so none can be named
    return None
