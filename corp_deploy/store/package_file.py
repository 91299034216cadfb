"""Packages of AOTInductor (.pt2) of our models, with the facts that ONNX files carry."""

from pathlib import Path

import numpy as np

from corp_deploy.families.family import output_ports
from corp_deploy.families.timm_library import NORMS
from corp_deploy.spec.widths import HeadGeometry
from export.graph.package_notes import PackageNotes
from export.graph.to_package import Device, package_from_model
from ground.built_engines import record_built_engine
from ground.errors import BadInput
from ground.feeds import random_feeds, select_rows
from ground.files import replacing, sha256_of_file
from perf.runners.torch_package import PackageRunner

from .checkpoint import Checkpoint
from .graph_facts import port_of
from .onnx_file import GraphInput, export_form, metadata_of_checkpoint

_CLOSE = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.2}
"""The largest difference, relative to the largest output, between one input's outputs alone and in a batch."""


def export_package(
    checkpoint: Checkpoint,
    path: Path,
    *,
    precision: str,
    batch: int | None = None,
    device: Device = "cpu",
    threads: int | None = None,
    geometry: HeadGeometry | None = None,
    graph_input: GraphInput = "float32",
) -> PackageNotes:
    """Compile the model to a package for one batch size, or for any if `batch` is None, and list it as built here.

    Raises Missing without a compiler or the GPU, and BadInput if AOTInductor can't compile the model for any batch.
    """
    form = export_form(checkpoint, precision=precision, geometry=geometry, graph_input=graph_input)
    with replacing(path) as temporary:
        notes = package_from_model(
            form.model,
            temporary,
            form.inputs,
            output_ports(checkpoint.model),
            precision=precision,
            batch=batch,
            device=device,
            threads=threads,
            metadata={**metadata_of_checkpoint(checkpoint), **form.notes},
            norms=NORMS,
        )
        _require_any_batch(notes, temporary, path)
    record_built_engine(sha256_of_file(path))
    return notes


def _require_any_batch(notes: PackageNotes, compiled: Path, path: Path) -> None:
    """Raise BadInput if a package for any batch answers one input otherwise alone than in a batch of three."""
    if notes.batch is not None:
        return
    inputs = tuple(map(port_of, notes.inputs))
    feeds = random_feeds(inputs, 3, seed=0)
    with PackageRunner(compiled, inputs, device=notes.device) as run:
        alone, together = run(select_rows(feeds, slice(1))), run(feeds)
    for name, rows in together.items():
        apart = float(np.abs(alone[name][0] - rows[0]).max() / max(np.abs(rows[0]).max(), 1e-30))
        if not apart <= _CLOSE[notes.precision]:
            raise BadInput(
                f"{path}: compiled for any batch, its {name} of one input differs by {apart:.2g} from that of the same "
                "input in a batch of 3: the model's code depends on the batch; compile it for one size by --batch N"
            )
