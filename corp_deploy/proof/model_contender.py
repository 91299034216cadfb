"""Model directories as subjects of a benchmark: run by torch, compiled by AOTInductor, or exported."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.invocation.running import RunOptions
from corp_deploy.store.checkpoint import WEIGHTS, Checkpoint, save
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.fitted import fitted_of_lineage
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.store.package_file import export_package
from ground.errors import BadInput
from perf.runners.module import ModuleRunner

from .candidates import package_runner
from .contender import Contender, contender_from_graph, contender_from_package, facts_of_file


def _costs_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"macs": macs(checkpoint.model), "params": parameters(checkpoint.model)}


def _compiled_contender(
    name: str, checkpoint: Checkpoint, path: Path, running: RunOptions, label: str, batches: Sequence[int]
) -> Contender:
    """Compile a model to `path` with AOTInductor; raise BadInput for batch size 1 together with other sizes."""
    if 1 in batches and len(batches) > 1:
        others = ",".join(str(batch) for batch in batches if batch > 1)
        raise BadInput(
            f"--batch {','.join(map(str, batches))}: AOTInductor compiles a single input as a program of its own; "
            f"measure --batch 1 by itself, and --batch {others} in another run"
        )
    batch = 1 if list(batches) == [1] else None
    notes = export_package(checkpoint, path, precision=running.dtype or "fp32", batch=batch, threads=running.threads)
    made = contender_from_package(name, path, notes, running)
    return replace(made, open=partial(package_runner, path, notes, threads=running.threads, label=label))


def _from_module(name: str, checkpoint: Checkpoint, weights: Path, running: RunOptions) -> Contender:
    inputs = input_ports(checkpoint.model)
    open_module = partial(
        ModuleRunner,
        checkpoint.model,
        inputs=inputs,
        outputs=output_ports(checkpoint.model),
        device=running.device or "cpu",
        mode=running.mode or "eager",
        precision=running.dtype or "fp32",
        threads=running.threads,
        flush_l2=bool(running.flush_l2),
        label=weights.parent.name,
    )
    return Contender(name=name, open=open_module, inputs=inputs, **_costs_of(checkpoint), **facts_of_file(weights))


def contender_from_directory(
    name: str, path: Path, running: RunOptions, scratch: Path, batches: Sequence[int]
) -> Contender:
    """Return a model directory to be timed as `running` asks; exported and compiled files go to `scratch`."""
    checkpoint = model_of_directory(path)
    fitted = fitted_of_lineage(checkpoint.lineage, where=str(path))
    if running.backend == "torch":
        if not (path / WEIGHTS).is_file():  # a snapshot, whose weights may be of another kind or in several files
            path = scratch / name / path.name
            save(checkpoint, path)
        made = _from_module(name, checkpoint, path / WEIGHTS, running)
    elif running.backend == "aotinductor":
        made = _compiled_contender(name, checkpoint, scratch / f"{name}.pt2", running, path.name, batches)
    else:
        graph = scratch / f"{name}.onnx"
        export_checkpoint(checkpoint, graph, precision="fp32")
        made = contender_from_graph(name, graph, running)
    return replace(made, fitted=fitted)
